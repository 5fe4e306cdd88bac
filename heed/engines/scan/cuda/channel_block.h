// The part of a scan block that both passes share: constants, states in registers, and a tile of token data.
#ifndef HEED_ENGINES_SCAN_CUDA_CHANNEL_BLOCK_H_
#define HEED_ENGINES_SCAN_CUDA_CHANNEL_BLOCK_H_

#include <cstdint>

#include "heed/cuda/machine.h"
#include "heed/engines/scan/cuda/functions.h"
#include "heed/engines/scan/cuda/params.h"
#include "heed/engines/scan/cuda/tile.h"

namespace heed::scan::cuda {

template <class M, class ShapeOf>
class ChannelBlock {
 protected:
  using Shape = ShapeOf;
  static constexpr int kLanes = Shape::kLanes, kThreads = Shape::kThreads;
  static constexpr int kStates = Shape::kStates, kChannels = Shape::kChannels, kWeights = Shape::kWeights;
  static constexpr int kGroup = 4;  // tokens whose results are reduced together, one per lane
  static_assert(kGroup <= kLanes && kTokens % kGroup == 0);
  using ChannelTile = PaddedTile<kChannels>;

  HEED_DEVICE ChannelBlock(M& m, const ScanParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), channel_block_(m.block(0)),
        group_(channel_block_ / p.channel_blocks), lane_(m.thread() % kLanes), channel_(m.thread() / kLanes),
        shared_(reinterpret_cast<float*>(m.shared())), steps_(shared_ + 2 * kWeights),
        x_(shared_ + 2 * kWeights + Shape::kPaddedTile), B_(OwnOf(p.B, shared_)), C_(OwnOf(p.C, shared_ + kWeights)) {
    const int of_group = p.channels / p.groups, begin = channel_block_ % p.channel_blocks * kChannels;
    first_channel_ = group_ * of_group + begin;
    columns_ = of_group - begin < kChannels ? of_group - begin : kChannels;
    const int left = p.states - lane_ * kOwn;
    own_ = channel_ >= columns_ || left < 0 ? 0 : left < kOwn ? left : kOwn;
  }

  HEED_DEVICE static int Tiles(int64_t tokens) { return static_cast<int>((tokens + kTokens - 1) / kTokens); }
  HEED_DEVICE int TokensAt(int tile) const {
    const int64_t left = s_.tokens - int64_t{tile} * kTokens;
    return left < kTokens ? static_cast<int>(left) : kTokens;
  }

  // Calls f(index, state) for this thread's existing states.
  template <class F>
  HEED_DEVICE void ForOwn(const F& f) const {
    HEED_DEVICE_UNROLL
    for (int n = 0; n < kOwn; ++n) {
      if (n < own_) f(n, lane_ * kOwn + n);
    }
  }
  // Offset of a channel's constant or state.
  HEED_DEVICE static int64_t PlaceIn(const DeviceNumbers& numbers, int channel, int state) {
    return channel * numbers.channel + state * numbers.state;
  }
  HEED_DEVICE int of_all() const { return first_channel_ + channel_; }  // this thread's channel
  HEED_DEVICE States Load(const DeviceNumbers& from, int64_t of_sequence) const {
    States states = {};
    if (from.data == nullptr) return states;
    ForOwn([&](int n, int state) {
      states.at[n] = static_cast<const float*>(from.data)[of_sequence + PlaceIn(from, of_all(), state)];
    });
    return states;
  }
  HEED_DEVICE void Store(const States& states, const DeviceNumbers& to, int64_t of_sequence) const {
    if (to.data == nullptr) return;
    ForOwn([&](int n, int state) {
      static_cast<float*>(const_cast<void*>(to.data))[of_sequence + PlaceIn(to, of_all(), state)] = states.at[n];
    });
  }
  // The states before a tile, which the forward pass stores and the backward pass loads.
  HEED_DEVICE States& BoundaryState(int tile) const {
    const int64_t block = (s_.first_tile + tile) * (int64_t{p_.groups} * p_.channel_blocks) + channel_block_;
    return reinterpret_cast<States*>(p_.boundary_states)[block * kThreads + m_.thread()];
  }

  // Loads constants, before the first tile. A barrier must follow.
  HEED_DEVICE void LoadConstants() {
    ForOwn([&](int n, int state) { rates_.at[n] = RateOf(NumberAt<M>(p_.A, PlaceIn(p_.A, of_all(), state))); });
    if (p_.skip.data != nullptr && channel_ < columns_) skip_ = NumberAt<M>(p_.skip, PlaceIn(p_.skip, of_all(), 0));
    if (lane_ == 0) {
      const bool has_bias = p_.bias.data != nullptr && channel_ < columns_;
      bias(channel_) = has_bias ? NumberAt<M>(p_.bias, PlaceIn(p_.bias, of_all(), 0)) : 0;
    }
    PutConstants(p_.B.constants, shared_);
    PutConstants(p_.C.constants, shared_ + kWeights);
  }

  // Prefetches a tile into registers; B and C if they are per token.
  HEED_DEVICE void Prefetch(int tile) {
    PrefetchColumns(x_bits_, p_.x, s_.x, tile);
    PrefetchColumns(delta_bits_, p_.delta, s_.delta, tile);
    PrefetchWeights(B_bits_, p_.B, s_.B, tile);
    PrefetchWeights(C_bits_, p_.C, s_.C, tile);
  }
  // Writes the prefetched tile to shared memory, after all threads have read the previous one. A barrier must follow.
  HEED_DEVICE void Put() const {
    x_bits_.ForEach(m_, p_.x, [&](int t, int c, float x) { x_(t, c) = x; });
    delta_bits_.ForEach(m_, p_.delta, [&](int t, int c, float delta) {
      const float step = delta + bias(c);
      steps_(t, c) = p_.softplus ? Softplus<M>(step) : step;
    });
    PutWeights(B_bits_, p_.B, shared_);
    PutWeights(C_bits_, p_.C, shared_ + kWeights);
  }
  using Columns = PrefetchedTile<kThreads, kChannels>;
  HEED_DEVICE void PrefetchColumns(Columns& bits, const DeviceTokens& tensor, int64_t of_sequence, int tile) const {
    bits.Prefetch(m_, tensor, of_sequence + tile * (kTokens * tensor.token) + first_channel_ * tensor.column,
                  TokensAt(tile), columns_);
  }
  // Stores a tile's rows from shared memory.
  HEED_DEVICE void StoreColumns(const ChannelTile& from, const DeviceTokens& to, int64_t of_sequence, int tile) const {
    if (to.data == nullptr) return;
    const int tokens = TokensAt(tile);
    const int64_t first = of_sequence + tile * (kTokens * to.token) + first_channel_ * to.column;
    Places<kThreads, kChannels>::ForEach(m_, to, [&](int, int t, int c) {
      if (t >= tokens || c >= columns_) return;
      heed::cuda::StoreFloat<M>(const_cast<void*>(to.data), to.dtype, first + t * to.token + c * to.column, from(t, c));
    });
  }

  // This thread's states of B and C at a token.
  HEED_DEVICE States B(int t) const { return B_.at[t * B_.of_token]; }
  HEED_DEVICE States C(int t) const { return C_.at[t * C_.of_token]; }

  HEED_DEVICE float SumOfLanes(float x) const {
    HEED_DEVICE_UNROLL
    for (int mask = kLanes / 2; mask > 0; mask /= 2) x += m_.ShuffleXor(x, mask);
    return x;
  }

  M& m_;
  const ScanParams& p_;
  const DeviceSequence& s_;
  const int channel_block_, group_, lane_, channel_;  // channel_: the thread's channel in the block
  float* const shared_;
  const ChannelTile steps_, x_;
  int first_channel_, columns_, own_;  // own_: the thread's existing states
  float skip_ = 0;
  States rates_ = {};

 private:
  using StateColumns = PrefetchedTile<kThreads, kStates>;

  HEED_DEVICE float& bias(int c) const { return shared_[2 * kWeights + 2 * Shape::kPaddedTile + c]; }

  HEED_DEVICE void PutConstants(const DeviceNumbers& from, float* rows) const {
    if (from.data == nullptr) return;
    States states = {};
    ForOwn([&](int n, int state) { states.at[n] = NumberAt<M>(from, PlaceIn(from, of_all(), state)); });
    reinterpret_cast<States*>(rows)[m_.thread()] = states;
  }
  HEED_DEVICE void PrefetchWeights(StateColumns& bits, const DeviceWeights& weights, int64_t of_sequence,
                                   int tile) const {
    const DeviceTokens& tensor = weights.tokens;
    if (weights.constants.data != nullptr) return;
    bits.Prefetch(m_, tensor, of_sequence + tile * (kTokens * tensor.token) + group_ * tensor.group, TokensAt(tile),
                  p_.states);
  }
  HEED_DEVICE void PutWeights(const StateColumns& bits, const DeviceWeights& weights, float* rows) const {
    if (weights.constants.data != nullptr) return;
    bits.ForEach(m_, weights.tokens, [&](int t, int n, float x) { rows[t * kStates + n] = x; });
  }

  // This thread's part of rows of B or C.
  struct OwnWeights {
    const States* at;
    int of_token;  // stride between tokens; 0 for constants
  };
  HEED_DEVICE OwnWeights OwnOf(const DeviceWeights& weights, const float* rows) const {
    const bool constant = weights.constants.data != nullptr;
    return {reinterpret_cast<const States*>(rows) + (constant ? m_.thread() : lane_), constant ? 0 : kLanes};
  }

  const OwnWeights B_, C_;
  Columns x_bits_, delta_bits_;
  StateColumns B_bits_, C_bits_;
};

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_CHANNEL_BLOCK_H_
