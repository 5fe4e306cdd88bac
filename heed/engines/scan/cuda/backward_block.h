// The backward pass of selective scans: a block sweeps its channels through all tokens of a sequence, tile by tile, in
// reverse.
//
// A tile starts from the boundary state before it, which the forward pass has stored, and sweeps its tokens twice:
// forward, which stores the state after each token in shared memory, and in reverse. With p the gradient of h, each
// state and token computes
//
//   q = p + dy C,  dx' += q B,  r = q a h_{t-1},  ds' += r A,  dA += r s,  p = a q
//
// in registers, with a computed again. q replaces the token's state in shared memory, which is not read again. dB and
// dC, which are sums over channels, are summed from shared memory in between: of q s x and of dy h. The order and
// grouping of sums depends only on the token's position in its sequence.
#ifndef HEED_ENGINES_SCAN_CUDA_BACKWARD_BLOCK_H_
#define HEED_ENGINES_SCAN_CUDA_BACKWARD_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/engines/scan/cuda/channel_block.h"

namespace heed::scan::cuda {

template <class M, class Shape>
class BackwardBlock : public ChannelBlock<M, Shape> {
  using Base = ChannelBlock<M, Shape>;
  using typename Base::ChannelTile;
  using typename Base::Columns;
  using Sum = heed::cuda::Sum;

 public:
  HEED_DEVICE BackwardBlock(M& m, const GradientParams& p)
      : Base(m, p.scan), g_(p), own_gradients_(p.sequences[m.block(2)]), inputs_(Base::shared_ + Shape::kCommon),
        dy_(Base::shared_ + Shape::kCommon + Shape::kPaddedTile),
        gates_(Base::shared_ + Shape::kCommon + 2 * Shape::kPaddedTile),
        trace_(reinterpret_cast<States*>(Base::shared_ + Shape::kCommon + 3 * Shape::kPaddedTile)) {}

  HEED_DEVICE void Run() {
    this->LoadConstants();
    p_of_h_ = this->Load(g_.d_final, own_gradients_.d_final);
    const int tiles = Base::Tiles(s_.tokens);
    if (tiles > 0) Prefetch(tiles - 1);
    m_.Sync();
    for (int tile = tiles - 1; tile >= 0; --tile) {
      const int tokens = this->TokensAt(tile);
      const States before = before_;
      Put();
      m_.Sync();
      if (tile > 0) Prefetch(tile - 1);
      ForwardSweep(before, tokens);
      m_.Sync();
      AddUp(dy_, p_.C, g_.C_partials, dC_, tile);
      m_.Sync();
      ReversedSweep(before, tokens);
      m_.Sync();
      AddUp(inputs_, p_.B, g_.B_partials, dB_, tile);
      this->StoreColumns(x_, g_.dx, own_gradients_.dx, tile);
      this->StoreColumns(steps_, g_.ddelta, own_gradients_.ddelta, tile);
      this->StoreColumns(gates_, g_.dgate, own_gradients_.dgate, tile);
      if (tile % (kChunkTokens / kTokens) == 0) EndChunk();
      m_.Sync();
    }
    this->Store(p_of_h_, g_.dinitial, own_gradients_.dinitial);
    StoreSums();
  }

 private:
  using Base::channel_, Base::kChannels, Base::kGroup, Base::kLanes, Base::kThreads, Base::lane_, Base::m_, Base::own_,
      Base::p_, Base::s_, Base::steps_, Base::SumOfLanes, Base::x_;

  // The sum of a constant's gradient: over the current chunk, and over the chunks before.
  struct ConstantSum {
    float of_chunk = 0;
    Sum sum;

    HEED_DEVICE void EndChunk() {
      sum = sum + Sum{of_chunk, 0};
      of_chunk = 0;
    }
  };

  HEED_DEVICE bool is_gated() const { return p_.gate.data != nullptr; }
  HEED_DEVICE void Prefetch(int tile) {
    Base::Prefetch(tile);
    this->PrefetchColumns(d_o_bits_, g_.d_o, own_gradients_.d_o, tile);
    if (is_gated()) this->PrefetchColumns(gate_bits_, p_.gate, s_.gate, tile);
    before_ = this->BoundaryState(tile);
  }
  HEED_DEVICE void Put() const {
    Base::Put();
    d_o_bits_.ForEach(m_, g_.d_o, [&](int t, int c, float d_o) { dy_(t, c) = d_o; });
    if (is_gated()) gate_bits_.ForEach(m_, p_.gate, [&](int t, int c, float z) { gates_(t, c) = z; });
  }
  HEED_DEVICE States& TraceOf(int t) const { return trace_[t * kThreads + m_.thread()]; }

  // The forward sweep: stores states after tokens and s x, and replaces d_o by dy and z by dz.
  HEED_DEVICE void ForwardSweep(States h, int tokens) const {
    for (int first = 0; first < tokens; first += kGroup) {
      float of_lane = 0;  // y of token first + lane
      HEED_DEVICE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const int t = first + i;
        if (t >= tokens) break;
        const float step = steps_(t, channel_), input = step * x_(t, channel_);
        const States B = this->B(t), C = this->C(t);
        float y = 0;
        HEED_DEVICE_UNROLL
        for (int n = 0; n < kOwn; ++n) {
          h.at[n] = Decayed(DecayOf<M>(step * this->rates_.at[n]), h.at[n]) + input * B.at[n];
          if (n < own_) y += C.at[n] * h.at[n];
        }
        TraceOf(t) = h;
        if (!is_gated()) continue;
        y = SumOfLanes(y);
        if (lane_ == i) of_lane = y;
      }
      const int t = first + lane_;
      if (lane_ >= kGroup || t >= tokens) continue;
      const float x = x_(t, channel_);
      inputs_(t, channel_) = steps_(t, channel_) * x;
      if (!is_gated()) continue;
      const float z = gates_(t, channel_), d_o = dy_(t, channel_), y = of_lane + this->skip_ * x;
      const Sigmoids of_z = SigmoidsOf<M>(z);
      dy_(t, channel_) = d_o * (z * of_z.s);
      gates_(t, channel_) = d_o * y * (z * of_z.s * of_z.complement + of_z.s);
    }
  }

  // The reversed sweep: replaces states by q, x by dx and steps by ddelta.
  HEED_DEVICE void ReversedSweep(const States& before, int tokens) {
    for (int first = (tokens - 1) / kGroup * kGroup; first >= 0; first -= kGroup) {
      float dx_of_lane = 0, ds_of_lane = 0;  // of token first + lane
      HEED_DEVICE_UNROLL
      for (int i = kGroup - 1; i >= 0; --i) {
        const int t = first + i;
        if (t >= tokens) continue;
        const float step = steps_(t, channel_), dy = dy_(t, channel_);
        const States B = this->B(t), C = this->C(t), h = t > 0 ? TraceOf(t - 1) : before;
        States q;
        float dx = 0, ds = 0;
        HEED_DEVICE_UNROLL
        for (int n = 0; n < kOwn; ++n) {
          const Decay decay = DecayOf<M>(step * this->rates_.at[n]);
          q.at[n] = p_of_h_.at[n] + dy * C.at[n];
          const float r = q.at[n] * Decayed(decay, h.at[n]);
          dA_[n].of_chunk += r * step;
          p_of_h_.at[n] = Decayed(decay, q.at[n]);
          if (n < own_) {
            dx += q.at[n] * B.at[n];
            ds += r * this->rates_.at[n];
          }
        }
        TraceOf(t) = q;
        dx = SumOfLanes(dx);
        ds = SumOfLanes(ds);
        if (lane_ == i) {
          dx_of_lane = dx;
          ds_of_lane = ds;
        }
      }
      const int t = first + lane_;
      if (lane_ >= kGroup || t >= tokens) continue;
      const float x = x_(t, channel_), step = steps_(t, channel_), dy = dy_(t, channel_);
      float ds = kLn2 * ds_of_lane + x * dx_of_lane;
      if (p_.softplus) ds *= -expm1f(-step);  // the derivative is 1 - e^-s
      dskip_.of_chunk += dy * x;
      dbias_.of_chunk += ds;
      x_(t, channel_) = step * dx_of_lane + this->skip_ * dy;
      steps_(t, channel_) = ds;
    }
  }

  // Adds up factors times the traced states or q: over channels, or, for constants, over tokens.
  HEED_DEVICE void AddUp(const ChannelTile& factors, const DeviceWeights& weights, float* partials,
                         ConstantSum (&constants)[kOwn], int tile) {
    const int tokens = this->TokensAt(tile);
    if (weights.constants.data != nullptr) {
      for (int t = 0; t < tokens; ++t) {
        const States states = TraceOf(t);
        const float factor = factors(t, channel_);
        HEED_DEVICE_UNROLL
        for (int n = 0; n < kOwn; ++n) constants[n].of_chunk += factor * states.at[n];
      }
      return;
    }
    if (partials == nullptr) return;
    // Threads per sum, for chains of at most eight additions.
    constexpr int kSplit = kChannels > 16 ? kChannels / 16 : 1;
    static_assert(kTokens * kLanes * kSplit % kThreads == 0);
    for (int i = m_.thread(); i < kTokens * kLanes * kSplit; i += kThreads) {
      const int split = i % kSplit, lane = i / kSplit % kLanes, t = i / (kSplit * kLanes);
      float sums[2][kOwn] = {};
      HEED_DEVICE_UNROLL
      for (int k = 0; k < kChannels / kSplit; ++k) {
        const int c = k * kSplit + split;
        if (t >= tokens || c >= this->columns_) continue;
        const States states = trace_[t * kThreads + c * kLanes + lane];
        const float factor = factors(t, c);
        HEED_DEVICE_UNROLL
        for (int n = 0; n < kOwn; ++n) sums[k % 2][n] += factor * states.at[n];
      }
      const int64_t token = own_gradients_.first_token + int64_t{tile} * kTokens + t;
      float* to =
          partials +
          ((this->channel_block_ % p_.channel_blocks * g_.tokens + token) * p_.groups + this->group_) * p_.states;
      HEED_DEVICE_UNROLL
      for (int n = 0; n < kOwn; ++n) {
        float sum = sums[0][n] + sums[1][n];
        HEED_DEVICE_UNROLL
        for (int mask = 1; mask < kSplit; mask *= 2) sum += m_.ShuffleXor(sum, mask);
        const int state = lane * kOwn + n;
        if (split == 0 && t < tokens && state < p_.states) to[state] = sum;
      }
    }
  }

  HEED_DEVICE void EndChunk() {
    HEED_DEVICE_UNROLL
    for (int n = 0; n < kOwn; ++n) {
      dA_[n].EndChunk();
      dB_[n].EndChunk();
      dC_[n].EndChunk();
    }
    dskip_.EndChunk();
    dbias_.EndChunk();
  }
  HEED_DEVICE void StoreSums() const {
    this->ForOwn([&](int n, int state) {
      StoreSum(state, dA_[n].sum);
      if (p_.B.constants.data != nullptr) StoreSum(g_.B_row() + state, dB_[n].sum);
      if (p_.C.constants.data != nullptr) StoreSum(g_.C_row() + state, dC_[n].sum);
    });
    const Sum dskip = SumOfLanes(dskip_.sum), dbias = SumOfLanes(dbias_.sum);
    if (lane_ != 0 || channel_ >= this->columns_) return;
    StoreSum(g_.skip_row(), dskip);
    StoreSum(g_.bias_row(), dbias);
  }
  HEED_DEVICE void StoreSum(int row, const Sum& sum) const {
    g_.sums[(own_gradients_.index * g_.rows() + row) * p_.channels + this->of_all()] = sum;
  }
  HEED_DEVICE Sum SumOfLanes(Sum x) const {
    HEED_DEVICE_UNROLL
    for (int mask = kLanes / 2; mask > 0; mask /= 2)
      x = x + Sum{m_.ShuffleXor(x.high, mask), m_.ShuffleXor(x.low, mask)};
    return x;
  }

  const GradientParams& g_;
  const GradientSequence& own_gradients_;
  const ChannelTile inputs_, dy_, gates_;
  States* const trace_;  // [kTokens][thread]
  Columns d_o_bits_, gate_bits_;
  States before_, p_of_h_;
  ConstantSum dA_[kOwn], dB_[kOwn], dC_[kOwn];
  ConstantSum dskip_, dbias_;
};

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_BACKWARD_BLOCK_H_
