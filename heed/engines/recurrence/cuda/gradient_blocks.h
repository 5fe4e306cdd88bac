// Reductions after the sweeps of a backward pass: gradients of heads that share a row, of feature maps, and of log
// decays.
//
// The gradient of log decays starts at the end of each block of 64 tokens, with X = <S, D> there, per key channel or
// over all of them, and is a reversed sum:
//
//   X_t = X_{t+1} + q_t . dq_t - k_t . dk_t,  dlog_decay_t = X_t
//
// A delta rule, which also reads with r_t, adds r_t . dr_t. A read before the decay adds q_t . dq_t only to X of the
// token before.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_GRADIENT_BLOCKS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_GRADIENT_BLOCKS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

using heed::cuda::SumOfWarp;

inline constexpr int kGradientThreads = 128;

// Offsets of a sequence's rows, in elements, and the indices of its first token and block among those of all sequences.
// If tokens write several times, each write counts as a token.
struct GradientSequence {
  int64_t q, k, v, d_o, read_key, beta, log_decay, to, first_token, first_block, tokens, d_final, state;
};

// Gathers f32 rows of value heads: (from * from_factors - less * less_factors) * beta, summed over the heads that share
// a row of `to`, times the slope of the map or divided by the row's next element plus eps. The factors are at a
// sequence's v and d_o. Without `from` and `less` it writes zeros.
struct GatherParams {
  const float *from = nullptr, *less = nullptr;  // [token][value head][row]; null: zeros
  DeviceRows from_factors, less_factors;         // absent: 1
  DeviceRows q, beta, to;                        // q: the input of the map; or absent
  Map map = Map::kIdentity;
  int32_t value_heads = 1, group = 1, size = 1, row = 1;  // row: row size of `from`, which may exceed `size`
  bool divides = false;
  const float* floors = nullptr;  // [token][value head]: floors of the divisor; or null
  float eps = 0;
  int32_t writes = 1;
  int32_t slots = 1, slot = 0;  // rows of `from` per row of `to`, and the one that is taken
  GradientSequence sequences[kMostSequences] = {};
};

// Gradients of log decays. dk and dr of a delta rule lack the factor beta, and dr its sign.
struct DecayGradientParams {
  const float *dq, *dk, *dr;  // [token][value head][K], for dk and dr [write]; dr may be null
  const float* products;      // [block][value head][K]: <S, D> at ends of blocks
  DeviceRows q, k, read_key, beta, to;
  // Exponential gates, at a sequence's v and d_o: decays are the log sigmoid of forget gates, and the gradient of an
  // input gate is that of its key, summed over channels.
  DeviceRows forget_gate, d_input_gate;
  bool by_channel;
  bool queries_before_decay, read_keys_before_decay;  // reads precede the token's decay
  bool complement_keys;  // keys are 1 - exp(log decay): k are log decays, whose gradients include dk's
  int32_t value_heads, key_size, writes;
  GradientSequence sequences[kMostSequences] = {};
};

// <S, D> per key channel at the end of each block of tokens, with D the decayed gradient of the state there.
struct ProductParams {
  const float *states, *d_states;  // [block][value head][V][K]; D is absent at ends of sequences
  DeviceStates d_final;
  DeviceRows log_decay;
  float* products;  // [block][value head][K]
  bool by_channel;
  bool reads_before_decay;  // D includes the decay already
  int32_t value_heads, key_size, value_size, writes;
  GradientSequence sequences[kMostSequences] = {};
};

// Dot products of two tensors' rows, per token.
struct DotParams {
  const float *a, *b;  // [token][value head][size]
  DeviceRows to;
  int32_t value_heads, size, writes;
  GradientSequence sequences[kMostSequences] = {};
};

// Turns a normalised head, whose sums are [numerators, denominator], into a head with one more column that is not
// normalised: values [v, 1], and gradients of outputs [d_o / x, -<d_o, numerators> / x^2] with x = Denominator() + eps.
struct DenormalizeParams {
  const float* sums;       // [token][value head][V + 1]
  const float* floors;     // [token][value head]: floors of denominators; or null
  float *values, *d_sums;  // [token][value head][V + 1], written
  DeviceRows v, d_o;
  int32_t value_heads, value_size;
  float eps;
  GradientSequence sequences[kMostSequences] = {};
};

// Copies states of heads, or writes zeros.
struct StateCopyParams {
  DeviceStates from, to;
  int64_t from_stride, to_stride;  // between sequences
  int32_t key_size, value_size;
};

// Splits a token of RWKV-7 into two writes: keys b and k, read keys -a and 0. A sequence's offset of b is `v`.
struct SplitParams {
  DeviceRows k, b, a;
  DeviceRows keys, read_keys;  // written, both at a sequence's `to` offset
  int32_t size;
  GradientSequence sequences[kMostSequences] = {};
};

// Multiplies two tensors elementwise per value head, at a sequence's q and k offsets.
struct MultiplyParams {
  DeviceRows a, b, to;
  int32_t size;
  GradientSequence sequences[kMostSequences] = {};
};

// Gradients of constants per head: sums over all tokens or blocks.
struct TokenSumParams {
  const float* from;  // [token][value head][size]
  int64_t tokens;
  int32_t value_heads, size;
  DeviceRows to;
};
inline constexpr int kSummedColumns = heed::cuda::kWarp;  // columns per block

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
    case Map::kComplement: return -Exp<M>(LogDecay(x));
  }
  return 1;
}

// A token's number of a value head, or `absent` if there is none.
template <class M>
HEED_DEVICE float NumberOf(const DeviceRows& rows, int64_t first, int64_t t, int head, float absent, int writes = 1) {
  if (rows.data == nullptr) return absent;
  return heed::cuda::LoadFloat<M>(rows.data, rows.dtype, first + OfToken(rows, t, writes) + head * rows.head_stride);
}

// The divisor of outputs before eps: z_t . q_t, or with a floor max(|z_t . q_t|, floor).
HEED_DEVICE float Denominator(float product, const float* floor) {
  return floor == nullptr ? product : fabsf(product) < *floor ? *floor : fabsf(product);
}

// Gathers 64 tokens of a head of `to`.
template <class M>
class GatherBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE GatherBlock(M& m, const GatherParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int head = m_.block(1), row = p_.row;
    for (int64_t i = int64_t{m_.block(0)} * kBlock * p_.size + m_.thread();
         i < (int64_t{m_.block(0)} + 1) * kBlock * p_.size; i += m_.num_threads()) {
      const int64_t t = i / p_.size, e = i % p_.size;
      if (t >= s.tokens) return;
      float sum = 0;
      if (p_.from != nullptr || p_.less != nullptr) {
        for (int k = 0; k < p_.group; ++k) {
          const int value_head = head * p_.group + k;
          const int64_t at = (((s.first_token + t) * p_.slots + p_.slot) * p_.value_heads + value_head) * row + e;
          sum += NumberOf<M>(p_.beta, s.beta, t, value_head, 1, p_.writes) *
                 ((p_.from == nullptr ? 0 : p_.from[at] * Factor(p_.from_factors, s.v, t, value_head, e)) -
                  (p_.less == nullptr ? 0 : p_.less[at] * Factor(p_.less_factors, s.d_o, t, value_head, e)));
        }
        if (p_.divides) {
          const int64_t at = (s.first_token + t) * p_.value_heads + head;
          sum /= Denominator(p_.from[at * row + p_.size], p_.floors == nullptr ? nullptr : p_.floors + at) + p_.eps;
        }
        if (p_.map != Map::kIdentity) {
          sum *=
              SlopeOf<M>(p_.map, heed::cuda::LoadFloat<M>(p_.q.data, p_.q.dtype,
                                                          s.q + t * p_.q.token_stride + head * p_.q.head_stride + e));
        }
      }
      StoreFloat<M>(p_.to, s.to + OfToken(p_.to, t, p_.writes) + head * p_.to.head_stride + e, sum);
    }
  }

 private:
  HEED_DEVICE float Factor(const DeviceRows& rows, int64_t first, int64_t t, int head, int64_t e) const {
    return NumberOf<M>(rows, first + e, t, head / rows.group, 1, p_.writes);
  }

  M& m_;
  const GatherParams& p_;
};

// Computes gradients of log decays of 64 tokens of a value head.
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
          const float of_query = OfQuery(t, e), of_read_key = OfReadKey(t, e);
          x += (p_.queries_before_decay ? 0 : of_query) - OfKey(t, e) - (p_.read_keys_before_decay ? 0 : of_read_key);
          if (IsFirst(t)) StoreFloat<M>(p_.to, Place(t) + e, x + OfComplement(t, e));
          x += (p_.queries_before_decay ? of_query : 0) - (p_.read_keys_before_decay ? of_read_key : 0);
        }
      }
      return;
    }
    float* differences = reinterpret_cast<float*>(m_.shared());  // [kBlock]
    const int lane = m_.thread() % heed::cuda::kWarp, warp = m_.thread() / heed::cuda::kWarp;
    for (int64_t t = begin_ + warp; t < end_; t += m_.num_threads() / heed::cuda::kWarp) {
      float sum = 0, of_keys = 0;
      for (int e = lane; e < p_.key_size; e += heed::cuda::kWarp) {
        const float of_key = OfKey(t, e) + OfReadKey(t, e);
        sum += OfQuery(t, e) - of_key;
        of_keys += of_key;
      }
      sum = SumOfWarp(m_, sum);
      of_keys = SumOfWarp(m_, of_keys);
      if (lane != 0) continue;
      differences[t - begin_] = sum;
      if (p_.d_input_gate.data == nullptr) continue;
      StoreFloat<M>(p_.d_input_gate, s_.d_o + t * p_.d_input_gate.token_stride + head_ * p_.d_input_gate.head_stride,
                    of_keys);
    }
    m_.Sync();
    if (warp != 0) return;
    float x = 0;
    for (int e = lane; e < p_.key_size; e += heed::cuda::kWarp) x += products[e];
    x = SumOfWarp(m_, x);
    if (lane != 0 || p_.to.data == nullptr) return;
    for (int64_t t = end_ - 1; t >= begin_; --t) {
      x += differences[t - begin_];
      const float slope = p_.forget_gate.data == nullptr
                              ? 1
                              : heed::cuda::SigmoidsOf<M>(NumberOf<M>(p_.forget_gate, s_.v, t, head_, 0)).complement;
      if (IsFirst(t)) StoreFloat<M>(p_.to, Place(t), x * slope);
    }
  }

 private:
  HEED_DEVICE bool IsFirst(int64_t t) const { return t % p_.writes == 0; }  // a token decays before its first write
  HEED_DEVICE int64_t Place(int64_t t) const {
    return s_.to + OfToken(p_.to, t, p_.writes) + head_ * p_.to.head_stride;
  }
  HEED_DEVICE float OfComplement(int64_t t, int e) const {
    if (!p_.complement_keys) return 0;
    const int64_t row = (s_.first_token + t) * p_.value_heads + head_;
    const int64_t at = s_.k + t * p_.k.token_stride + head_ / p_.k.group * p_.k.head_stride + e;
    return SlopeOf<M>(Map::kComplement, heed::cuda::LoadFloat<M>(p_.k.data, p_.k.dtype, at)) *
           p_.dk[row * p_.key_size + e];
  }
  HEED_DEVICE int64_t InMemory(int64_t t, int e) const {
    return ((s_.first_token + t) * p_.value_heads + head_) * p_.key_size + e;
  }
  HEED_DEVICE float Of(const DeviceRows& rows, int64_t first, int64_t t, int e) const {
    return heed::cuda::LoadFloat<M>(rows.data, rows.dtype,
                                    first + OfToken(rows, t, p_.writes) + head_ / rows.group * rows.head_stride + e);
  }
  // q_t dq_t of a channel.
  HEED_DEVICE float OfQuery(int64_t t, int e) const {
    if (t % p_.writes != p_.writes - 1) return 0;  // a token reads after its last write
    const int64_t row = ((s_.first_token + t) / p_.writes) * p_.value_heads + head_;
    return Of(p_.q, s_.q, t, e) * p_.dq[row * p_.key_size + e];
  }
  // beta_t k_t dk_t and beta_t r_t dr_t of a channel.
  HEED_DEVICE float OfKey(int64_t t, int e) const {
    const float given = Of(p_.k, s_.k, t, e), k = p_.complement_keys ? Mapped<M>(Map::kComplement, given) : given;
    return Beta(t) * (k * p_.dk[InMemory(t, e)]);
  }
  HEED_DEVICE float OfReadKey(int64_t t, int e) const {
    return p_.dr == nullptr ? 0 : Beta(t) * (Of(p_.read_key, s_.read_key, t, e) * p_.dr[InMemory(t, e)]);
  }
  HEED_DEVICE float Beta(int64_t t) const { return NumberOf<M>(p_.beta, s_.beta, t, head_, 1, p_.writes); }

  M& m_;
  const DecayGradientParams& p_;
  const GradientSequence& s_;
  const int head_;
  const int64_t begin_, end_;
};

// Computes <S, D> at the end of a block of 64 tokens of a value head.
template <class M>
class ProductBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE ProductBlock(M& m, const ProductParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int head = m_.block(1);
    const int64_t end = (int64_t{m_.block(0)} + 1) * kBlock,
                  block = (s.first_block + m_.block(0)) * p_.value_heads + head;
    if (end - kBlock >= s.tokens) return;
    const bool last = end >= s.tokens;
    const int64_t size = int64_t{p_.key_size} * p_.value_size;
    for (int k = m_.thread(); k < p_.key_size; k += m_.num_threads()) {
      float sum = 0;
      for (int v = 0; v < p_.value_size && (!last || p_.d_final.data != nullptr); ++v) {
        const float d = last ? p_.d_final.data[s.d_final + head * p_.d_final.head_stride + k * p_.d_final.key_stride +
                                               v * p_.d_final.value_stride]
                             : p_.d_states[block * size + int64_t{v} * p_.key_size + k];
        sum += d * p_.states[block * size + int64_t{v} * p_.key_size + k];
      }
      if (!last && !p_.reads_before_decay && end % p_.writes == 0) {
        const int64_t of_head = head * p_.log_decay.head_stride + (p_.by_channel ? k : 0);
        const int64_t at = s.log_decay + OfToken(p_.log_decay, end, p_.writes) + of_head;
        sum *= Exp<M>(LogDecay(heed::cuda::LoadFloat<M>(p_.log_decay.data, p_.log_decay.dtype, at)));
      }
      p_.products[block * p_.key_size + k] = sum;
    }
  }

 private:
  M& m_;
  const ProductParams& p_;
};

// Computes dot products of 64 tokens of a value head.
template <class M>
class DotBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE DotBlock(M& m, const DotParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int lane = m_.thread() % heed::cuda::kWarp, head = m_.block(1);
    const int64_t begin = int64_t{m_.block(0)} * kBlock, end = begin + kBlock < s.tokens ? begin + kBlock : s.tokens;
    for (int64_t t = begin + m_.thread() / heed::cuda::kWarp; t < end; t += kGradientThreads / heed::cuda::kWarp) {
      const int64_t row = ((s.first_token + t) * p_.value_heads + head) * p_.size;
      float sum = 0;
      for (int e = lane; e < p_.size; e += heed::cuda::kWarp) sum += p_.a[row + e] * p_.b[row + e];
      sum = SumOfWarp(m_, sum);
      if (lane == 0) StoreFloat<M>(p_.to, s.to + OfToken(p_.to, t, p_.writes) + head * p_.to.head_stride, sum);
    }
  }

 private:
  M& m_;
  const DotParams& p_;
};

// Denormalises 64 tokens of a value head.
template <class M>
class DenormalizeBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE DenormalizeBlock(M& m, const DenormalizeParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int lane = m_.thread() % heed::cuda::kWarp, head = m_.block(1), size = p_.value_size;
    const int64_t begin = int64_t{m_.block(0)} * kBlock, end = begin + kBlock < s.tokens ? begin + kBlock : s.tokens;
    for (int64_t t = begin + m_.thread() / heed::cuda::kWarp; t < end; t += kGradientThreads / heed::cuda::kWarp) {
      const int64_t row = ((s.first_token + t) * p_.value_heads + head) * (size + 1);
      const float product = p_.sums[row + size];
      const float* floor = p_.floors == nullptr ? nullptr : p_.floors + row / (size + 1);
      const float inverse = 1 / (Denominator(product, floor) + p_.eps);
      float dot = 0;
      for (int e = lane; e < size; e += heed::cuda::kWarp) {
        const float d = NumberOf<M>(p_.d_o, s.d_o + e, t, head, 0);
        p_.values[row + e] = NumberOf<M>(p_.v, s.v + e, t, head, 0);
        p_.d_sums[row + e] = d * inverse;
        dot += d * (p_.sums[row + e] * inverse);
      }
      dot = SumOfWarp(m_, dot);
      if (lane != 0) continue;
      p_.values[row + size] = 1;
      const float slope = floor == nullptr ? 1 : fabsf(product) <= *floor ? 0 : product < 0 ? -1 : 1;
      p_.d_sums[row + size] = -dot * inverse * slope;
    }
  }

 private:
  M& m_;
  const DenormalizeParams& p_;
};

// Copies the state of one head and sequence.
template <class M>
class StateCopyBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE StateCopyBlock(M& m, const StateCopyParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const int64_t sequence = m_.block(2), head = m_.block(1);
    for (int64_t i = m_.thread(); i < int64_t{p_.key_size} * p_.value_size; i += kGradientThreads) {
      const auto place = [&](const DeviceStates& s, int64_t stride) {
        return sequence * stride + head * s.head_stride + i / p_.value_size * s.key_stride +
               i % p_.value_size * s.value_stride;
      };
      p_.to.data[place(p_.to, p_.to_stride)] =
          p_.from.data == nullptr ? 0 : p_.from.data[place(p_.from, p_.from_stride)];
    }
  }

 private:
  M& m_;
  const StateCopyParams& p_;
};

// Splits 64 tokens of a key head.
template <class M>
class SplitBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE SplitBlock(M& m, const SplitParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int64_t begin = int64_t{m_.block(0)} * kBlock * p_.size;
    for (int64_t i = begin + m_.thread(); i < begin + kBlock * p_.size; i += m_.num_threads()) {
      const int64_t t = i / p_.size, e = i % p_.size;
      if (t >= s.tokens) return;
      const auto put = [&](const DeviceRows& rows, int write, float x) {
        StoreFloat<M>(rows,
                      s.to + t * rows.token_stride + write * rows.write_stride + m_.block(1) * rows.head_stride + e, x);
      };
      const auto of = [&](const DeviceRows& rows, int64_t first) {
        return NumberOf<M>(rows, first + e, t, m_.block(1), 0);
      };
      put(p_.keys, 0, of(p_.b, s.v));
      put(p_.keys, 1, of(p_.k, s.k));
      put(p_.read_keys, 0, -of(p_.a, s.read_key));
      put(p_.read_keys, 1, 0);
    }
  }

 private:
  M& m_;
  const SplitParams& p_;
};

// Multiplies 64 tokens of a value head.
template <class M>
class MultiplyBlock {
 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE MultiplyBlock(M& m, const MultiplyParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const GradientSequence& s = p_.sequences[m_.block(2)];
    const int head = m_.block(1);
    const int64_t begin = int64_t{m_.block(0)} * kBlock * p_.size;
    for (int64_t i = begin + m_.thread(); i < begin + kBlock * p_.size; i += m_.num_threads()) {
      const int64_t t = i / p_.size, e = i % p_.size;
      if (t >= s.tokens) return;
      const float a = NumberOf<M>(p_.a, s.q + e, t, head / p_.a.group, 1),
                  b = NumberOf<M>(p_.b, s.k + e, t, head / p_.b.group, 1);
      StoreFloat<M>(p_.to, s.to + t * p_.to.token_stride + head * p_.to.head_stride + e, a * b);
    }
  }

 private:
  M& m_;
  const MultiplyParams& p_;
};

// Sums 32 columns of a value head, or one; groups of threads sum different tokens.
template <class M>
class TokenSumBlock {
 public:
  static constexpr int kSharedBytes = kGradientThreads * static_cast<int>(sizeof(Sum));

  HEED_DEVICE TokenSumBlock(M& m, const TokenSumParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const int thread = m_.thread(), head = m_.block(1), width = p_.size == 1 ? 1 : kSummedColumns;
    const int column = m_.block(0) * kSummedColumns + thread % width;
    Sum* sums = reinterpret_cast<Sum*>(m_.shared());
    Sum sum;
    for (int64_t t = thread / width; t < p_.tokens && column < p_.size; t += kGradientThreads / width) {
      sum = sum + Sum{p_.from[(t * p_.value_heads + head) * p_.size + column], 0};
    }
    sums[thread] = sum;
    for (int count = kGradientThreads / 2; count >= width; count /= 2) {
      m_.Sync();
      if (thread < count) sums[thread] = sums[thread] + sums[thread + count];
    }
    if (thread >= width || column >= p_.size) return;
    StoreFloat<M>(p_.to, head * p_.to.head_stride + column, sums[thread].high + sums[thread].low);
  }

 private:
  M& m_;
  const TokenSumParams& p_;
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_GRADIENT_BLOCKS_H_
