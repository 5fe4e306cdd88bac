// RWKV's u term (the bonus) and its gradients.
//
//   o_t gains scale <q_t, u .* k_t> v_t. With w_t = scale <d_o_t, v_t>,
//   dq_t gains w_t u .* k_t,  dk_t gains w_t u .* q_t,  du = sum_t w_t q_t .* k_t
#ifndef HEED_ENGINES_RECURRENCE_CUDA_BONUS_BLOCKS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_BONUS_BLOCKS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

struct BonusParams {
  DeviceRows q, k, v, d_o;
  DeviceRows u;                        // per head, of any dtype
  float* weights = nullptr;            // [token][value head]: <q, u .* k>, written
  float *dq = nullptr, *dk = nullptr;  // [token][value head][K], added to; null: not wanted
  float* shares = nullptr;             // [block][value head][K]: partial sums of du, written; null: not wanted
  float scale = 1;
  int32_t value_heads = 1, key_size = 1, value_size = 1;
  GradientSequence sequences[kMostSequences] = {};
};

// A block of 64 tokens of a value head.
template <class M>
class BonusBlock {
 protected:
  HEED_DEVICE BonusBlock(M& m, const BonusParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), head_(m.block(1)), lane_(m.thread() % heed::cuda::kWarp),
        warp_(m.thread() / heed::cuda::kWarp), begin_(int64_t{m.block(0)} * kBlock),
        end_(begin_ + kBlock < s_.tokens ? begin_ + kBlock : s_.tokens) {}

  HEED_DEVICE float Of(const DeviceRows& rows, int64_t first, int64_t t, int e) const {
    const int64_t at = first + t * rows.token_stride + head_ / rows.group * rows.head_stride + e;
    return heed::cuda::LoadFloat<M>(rows.data, rows.dtype, at);
  }
  HEED_DEVICE float Bonus(int e) const {
    const int64_t at = head_ * p_.u.head_stride + e;
    if (p_.u.dtype == DType::kF64) return static_cast<float>(static_cast<const double*>(p_.u.data)[at]);
    return heed::cuda::LoadFloat<M>(p_.u.data, p_.u.dtype, at);
  }
  HEED_DEVICE int64_t RowOf(int64_t t) const { return (s_.first_token + t) * p_.value_heads + head_; }
  // Calls f(t, sum over e of x(t, e)) for the block's tokens, one warp per token.
  template <class X, class F>
  HEED_DEVICE void ForSums(int size, const X& x, const F& f) const {
    for (int64_t t = begin_ + warp_; t < end_; t += kGradientThreads / heed::cuda::kWarp) {
      float sum = 0;
      for (int e = lane_; e < size; e += heed::cuda::kWarp) sum += x(t, e);
      sum = SumOfWarp(m_, sum);
      if (lane_ == 0) f(t, sum);
    }
  }

  M& m_;
  const BonusParams& p_;
  const GradientSequence& s_;
  const int head_, lane_, warp_;
  const int64_t begin_, end_;
};

template <class M>
class BonusWeightBlock : BonusBlock<M> {
  using Base = BonusBlock<M>;
  using Base::p_, Base::s_, Base::Of, Base::Bonus;

 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE BonusWeightBlock(M& m, const BonusParams& p) : Base(m, p) {}

  HEED_DEVICE void Run() const {
    this->ForSums(
        p_.key_size, [&](int64_t t, int e) { return Of(p_.q, s_.q, t, e) * (Bonus(e) * Of(p_.k, s_.k, t, e)); },
        [&](int64_t t, float sum) { p_.weights[this->RowOf(t)] = sum; });
  }
};

template <class M>
class BonusGradientBlock : BonusBlock<M> {
  using Base = BonusBlock<M>;
  using Base::m_, Base::p_, Base::s_, Base::begin_, Base::end_, Base::Of, Base::Bonus;

 public:
  static constexpr int kSharedBytes = kBlock * static_cast<int>(sizeof(float));

  HEED_DEVICE BonusGradientBlock(M& m, const BonusParams& p) : Base(m, p) {}

  HEED_DEVICE void Run() const {
    if (begin_ >= s_.tokens) return;
    float* weights = reinterpret_cast<float*>(m_.shared());  // [kBlock]
    this->ForSums(
        p_.value_size, [&](int64_t t, int e) { return Of(p_.d_o, s_.d_o, t, e) * Of(p_.v, s_.v, t, e); },
        [&](int64_t t, float sum) { weights[t - begin_] = p_.scale * sum; });
    m_.Sync();
    for (int e = m_.thread(); e < p_.key_size; e += kGradientThreads) {
      const float u = Bonus(e);
      float share = 0;
      for (int64_t t = begin_; t < end_; ++t) {
        const float q = Of(p_.q, s_.q, t, e), k = Of(p_.k, s_.k, t, e), w = weights[t - begin_];
        const int64_t at = this->RowOf(t) * p_.key_size + e;
        if (p_.dq != nullptr) p_.dq[at] += w * u * k;
        if (p_.dk != nullptr) p_.dk[at] += w * u * q;
        share += w * q * k;
      }
      if (p_.shares != nullptr) {
        p_.shares[((s_.first_block + m_.block(0)) * p_.value_heads + this->head_) * p_.key_size + e] = share;
      }
    }
  }
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_BONUS_BLOCKS_H_
