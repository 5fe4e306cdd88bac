// The forward pass of selective scans: a block sweeps its channels through all tokens of a sequence, tile by tile.
//
// Each state and token computes
//
//   h = 2^(s A log2 e) h + s x B,  y += C h
//
// in registers. The exponential is a polynomial or a special function; the 14 instructions are the bound with 16 states
// per channel. The next tile is prefetched during the computation of a tile.
#ifndef HEED_ENGINES_SCAN_CUDA_FORWARD_BLOCK_H_
#define HEED_ENGINES_SCAN_CUDA_FORWARD_BLOCK_H_

#include <cstdint>

#include "heed/cuda/machine.h"
#include "heed/engines/scan/cuda/channel_block.h"

namespace heed::scan::cuda {

template <class M, class Shape>
class ForwardBlock : public ChannelBlock<M, Shape> {
  using Base = ChannelBlock<M, Shape>;
  using typename Base::ChannelTile;

 public:
  HEED_DEVICE ForwardBlock(M& m, const ScanParams& p)
      : Base(m, p), gates_(Base::shared_ + Shape::kCommon), y_(Base::shared_ + Shape::kCommon + Shape::kPaddedTile) {}

  HEED_DEVICE void Run() {
    this->LoadConstants();
    state_ = this->Load(p_.initial, s_.initial);
    const int tiles = Base::Tiles(s_.tokens);
    if (tiles > 0) Prefetch(0);
    m_.Sync();
    for (int tile = 0; tile < tiles; ++tile) {
      Put();
      m_.Sync();
      if (tile + 1 < tiles) Prefetch(tile + 1);
      if (p_.boundary_states != nullptr) this->BoundaryState(tile) = state_;
      Sweep(this->TokensAt(tile));
      m_.Sync();
      this->StoreColumns(y_, p_.o, s_.o, tile);
    }
    this->Store(state_, p_.final, s_.final);
  }

 private:
  using Base::channel_, Base::kGroup, Base::lane_, Base::m_, Base::own_, Base::p_, Base::s_, Base::steps_, Base::x_;

  HEED_DEVICE bool is_gated() const { return p_.gate.data != nullptr; }
  HEED_DEVICE void Prefetch(int tile) {
    Base::Prefetch(tile);
    if (is_gated()) this->PrefetchColumns(gate_bits_, p_.gate, s_.gate, tile);
  }
  HEED_DEVICE void Put() const {
    Base::Put();
    if (!is_gated()) return;
    gate_bits_.ForEach(m_, p_.gate, [&](int t, int c, float z) { gates_(t, c) = z * SigmoidsOf<M>(z).s; });
  }

  HEED_DEVICE void Sweep(int tokens) {
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
          state_.at[n] = Decayed(DecayOf<M>(step * this->rates_.at[n]), state_.at[n]) + input * B.at[n];
          if (n < own_) y += C.at[n] * state_.at[n];
        }
        y = this->SumOfLanes(y);
        if (lane_ == i) of_lane = y;
      }
      const int t = first + lane_;
      if (lane_ >= kGroup || t >= tokens) continue;
      const float y = of_lane + this->skip_ * x_(t, channel_);
      y_(t, channel_) = is_gated() ? y * gates_(t, channel_) : y;
    }
  }

  const ChannelTile gates_, y_;
  States state_;
  typename Base::Columns gate_bits_;
};

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_FORWARD_BLOCK_H_
