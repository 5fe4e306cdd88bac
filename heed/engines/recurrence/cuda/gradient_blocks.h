// What becomes of the walks of a backward pass: gradients of heads that share a row, of maps, and of decays.
//
// Gradients of log decays begin where a block of 64 tokens ends, with X = <S, D> there, by key channel or over all of them,
// and go on against time:
//
//   X_t = X_{t+1} + q_t . dq_t - k_t . dk_t,  dlog_decay_t = X_t
#ifndef HEED_ENGINES_RECURRENCE_CUDA_GRADIENT_BLOCKS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_GRADIENT_BLOCKS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

inline constexpr int kGradientThreads = 128;

// Where a sequence's rows begin, in elements, and which token and block of all sequences' is its first.
struct GradientSequence {
  int64_t q, k, to, first_token, first_block, tokens;
};

// Rows of f32 of value heads, summed over those that share one of `to`, times the slope of the map, or divided by one more
// element of theirs plus eps; or zeros.
struct GatherParams {
  const float* from = nullptr;  // [token][value head][size]; null: zeros
  DeviceRows x, to;             // x: what was mapped, or none
  Map map = Map::kIdentity;
  int32_t value_heads = 1, group = 1, size = 1;
  bool divides = false;
  float eps = 0;
  GradientSequence sequences[kMostSequences] = {};
};

struct DecayGradientParams {
  const float *dq, *dk;   // [token][value head][K]
  const float* products;  // [block][value head][K]
  DeviceRows q, k, to;
  bool by_channel;
  int32_t value_heads, key_size;
  GradientSequence sequences[kMostSequences] = {};
};

// Gradients of decays that are constants of heads: sums over all tokens.
struct TokenSumParams {
  const float* from;  // [token][value head]
  int64_t tokens;
  int32_t value_heads;
  DeviceRows to;
};

template <class M>
HEED_DEVICE void StoreFloat(const DeviceRows& rows, int64_t i, float x) {
  heed::cuda::StoreFloat<M>(const_cast<void*>(rows.data), rows.dtype, i, x);
}

template <class M>
HEED_DEVICE float SlopeOf(Map map, float x) {
  switch (map) {
    case Map::kIdentity: return 1;
    case Map::kElu1: return x > 0 ? 1 : Exp<M>(x);
    case Map::kRelu: return x > 0 ? 1 : 0;
    case Map::kReluSquared: return x > 0 ? 2 * x : 0;
    case Map::kExp: return x > 80 ? 0 : Exp<M>(x);
  }
  return 1;
}

// 64 tokens of a head of `to`.
template <class M>
class GatherBlock {
 public:
  HEED_DEVICE GatherBlock(M& m, const GatherParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int head = m_.block(1), row = p_.size + (p_.divides ? 1 : 0);
    for (int64_t i = int64_t{m_.block(0)} * kBlock * p_.size + m_.thread(); i < (int64_t{m_.block(0)} + 1) * kBlock * p_.size;
         i += m_.num_threads()) {
      const int64_t t = i / p_.size, e = i % p_.size;
      if (t >= s.tokens) return;
      float sum = 0;
      if (p_.from != nullptr) {
        for (int k = 0; k < p_.group; ++k) {
          sum += p_.from[((s.first_token + t) * p_.value_heads + head * p_.group + k) * row + e];
        }
        if (p_.divides) sum /= p_.from[((s.first_token + t) * p_.value_heads + head) * row + p_.size] + p_.eps;
        if (p_.map != Map::kIdentity) {
          const float x = heed::cuda::LoadFloat<M>(p_.x.data, p_.x.dtype,
                                                   s.q + t * p_.x.token_stride + head * p_.x.head_stride + e);
          sum *= SlopeOf<M>(p_.map, x);
        }
      }
      StoreFloat<M>(p_.to, s.to + t * p_.to.token_stride + head * p_.to.head_stride + e, sum);
    }
  }

 private:
  M& m_;
  const GatherParams& p_;
};

// 64 tokens of a value head.
template <class M>
class DecayGradientBlock {
 public:
  static constexpr int kSharedBytes = kBlock * static_cast<int>(sizeof(float));

  HEED_DEVICE DecayGradientBlock(M& m, const DecayGradientParams& p)
      : m_(m), p_(p), s_(p.sequences[m.block(2)]), head_(m.block(1)), begin_(int64_t{m.block(0)} * kBlock),
        end_(begin_ + kBlock < s_.tokens ? begin_ + kBlock : s_.tokens) {}

  HEED_DEVICE void Run() const {
    if (begin_ >= s_.tokens) return;
    const float* products = p_.products + ((s_.first_block + m_.block(0)) * p_.value_heads + head_) * p_.key_size;
    if (p_.by_channel) {
      for (int e = m_.thread(); e < p_.key_size; e += m_.num_threads()) {
        float x = products[e];
        for (int64_t t = end_ - 1; t >= begin_; --t) {
          x += Difference(t, e);
          StoreFloat<M>(p_.to, Place(t) + e, x);
        }
      }
      return;
    }
    float* differences = reinterpret_cast<float*>(m_.shared());  // [kBlock]
    const int lane = m_.thread() % heed::cuda::kWarp, warp = m_.thread() / heed::cuda::kWarp;
    for (int64_t t = begin_ + warp; t < end_; t += m_.num_threads() / heed::cuda::kWarp) {
      float sum = 0;
      for (int e = lane; e < p_.key_size; e += heed::cuda::kWarp) sum += Difference(t, e);
      sum = SumOfWarp(sum);
      if (lane == 0) differences[t - begin_] = sum;
    }
    m_.Sync();
    if (warp != 0) return;
    float x = 0;
    for (int e = lane; e < p_.key_size; e += heed::cuda::kWarp) x += products[e];
    x = SumOfWarp(x);
    if (lane != 0) return;
    for (int64_t t = end_ - 1; t >= begin_; --t) {
      x += differences[t - begin_];
      StoreFloat<M>(p_.to, Place(t), x);
    }
  }

 private:
  HEED_DEVICE int64_t Place(int64_t t) const { return s_.to + t * p_.to.token_stride + head_ * p_.to.head_stride; }
  // q_t dq_t - k_t dk_t of a channel.
  HEED_DEVICE float Difference(int64_t t, int e) const {
    const int64_t at = ((s_.first_token + t) * p_.value_heads + head_) * p_.key_size + e;
    const auto of = [&](const DeviceRows& rows, int64_t first) {
      return heed::cuda::LoadFloat<M>(rows.data, rows.dtype,
                                      first + t * rows.token_stride + head_ / rows.group * rows.head_stride + e);
    };
    return of(p_.q, s_.q) * p_.dq[at] - of(p_.k, s_.k) * p_.dk[at];
  }
  HEED_DEVICE float SumOfWarp(float x) const {
    for (int mask = heed::cuda::kWarp / 2; mask > 0; mask /= 2) x += m_.ShuffleXor(x, mask);
    return x;
  }

  M& m_;
  const DecayGradientParams& p_;
  const GradientSequence& s_;
  const int head_;
  const int64_t begin_, end_;
};

// A value head.
template <class M>
class TokenSumBlock {
 public:
  static constexpr int kSharedBytes = kGradientThreads * static_cast<int>(sizeof(Sum));

  HEED_DEVICE TokenSumBlock(M& m, const TokenSumParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const int thread = m_.thread(), head = m_.block(1);
    Sum* sums = reinterpret_cast<Sum*>(m_.shared());
    Sum sum;
    for (int64_t t = thread; t < p_.tokens; t += kGradientThreads) {
      sum = sum + Sum{p_.from[t * p_.value_heads + head], 0};
    }
    sums[thread] = sum;
    for (int count = kGradientThreads / 2; count > 0; count /= 2) {
      m_.Sync();
      if (thread < count) sums[thread] = sums[thread] + sums[thread + count];
    }
    if (thread == 0) StoreFloat<M>(p_.to, head * p_.to.head_stride, sums[0].high + sums[0].low);
  }

 private:
  M& m_;
  const TokenSumParams& p_;
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_GRADIENT_BLOCKS_H_
