// SSD on a GPU besides its recurrence: time steps, and gradients from those of the recurrence. See ssd.h.
//
// Everything is bound by memory, except time steps with one softplus per token and head.
#ifndef HEED_OPS_SSM_SSD_CUDA_ELEMENT_BLOCKS_INTERNAL_H_
#define HEED_OPS_SSM_SSD_CUDA_ELEMENT_BLOCKS_INTERNAL_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/library.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"

namespace heed::ssd::cuda {

using heed::cuda::SigmoidsOf;
using heed::cuda::Softplus;
using heed::cuda::Sum;

inline constexpr int kThreads = 128, kTokens = 64;  // per block
inline constexpr int kMostRanges = 512;             // per launch

// A tensor over sequences, tokens and heads, or over heads alone. Rows of channels are contiguous.
struct DeviceView {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0, channel_stride = 1;

  HEED_HOST_DEVICE int64_t At(int64_t batch, int64_t token, int head) const {
    return batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// Tokens of a sequence. Blocks of tokens are counted over all sequences.
struct Range {
  int64_t batch, begin, count, first_block;
};

struct StepParams {
  DeviceView dt, A, bias, D;          // over tokens; heads; heads; heads and maybe channels
  DeviceView delta, log_decay, skip;  // written, f32; skip has rows of channels
  float low, high;
  bool softplus;
  int32_t channels;
  Range ranges[kMostRanges];
};

struct GateParams {
  DeviceView z, d_o;
  DeviceView y;   // input of the gate, overwritten by its gradient
  DeviceView dz;  // written; null: not wanted
  int32_t channels;
  Range ranges[kMostRanges];
};

struct FinishParams {
  DeviceView x, dt, A, bias, delta, skip, dy, dv, d_log_decay;
  DeviceView dx, ddt;  // written; null: not wanted
  float* sums;         // [block of all sequences][head][2 + channels]: partial sums of dA, ddt_bias and dD
  float low, high;
  bool softplus;
  int32_t channels, heads;
  Range ranges[kMostRanges];
};

// Zeroes gradients of tokens of no sequence.
struct ClearParams {
  DeviceView dx, dz, ddt;
  int32_t channels;
  Range ranges[kMostRanges];
};

struct TotalParams {
  const float* sums;
  int64_t blocks;
  DeviceView dA, dbias, dD;  // written; null: not wanted
  bool by_channel;           // dD has channels
  int32_t channels, heads;
};

template <class M>
HEED_DEVICE float Number(const DeviceView& v, int64_t i) {
  if (v.dtype == DType::kF64) return static_cast<float>(static_cast<const double*>(v.data)[i]);
  return heed::cuda::LoadFloat<M>(v.data, v.dtype, i);
}
template <class M>
HEED_DEVICE void Put(const DeviceView& v, int64_t i, float x) {
  heed::cuda::StoreFloat<M>(v.data, v.dtype, i, x);
}

// A block of tokens of a head.
template <class M>
class TokenBlock {
 protected:
  template <class Params>
  HEED_DEVICE TokenBlock(M& m, const Params& p)
      : m_(m), range_(p.ranges[m.block(2)]), head_(m.block(1)), begin_(int64_t{m.block(0)} * kTokens),
        end_(begin_ + kTokens < range_.count ? begin_ + kTokens : range_.count) {}

  HEED_DEVICE int64_t At(const DeviceView& v, int64_t t) const { return v.At(range_.batch, range_.begin + t, head_); }

  M& m_;
  const Range& range_;
  const int head_;
  const int64_t begin_, end_;
};

// Computes delta, log_decay, and D in the form that the recurrence takes.
template <class M>
class StepBlock : TokenBlock<M> {
  using TokenBlock<M>::m_, TokenBlock<M>::head_, TokenBlock<M>::begin_, TokenBlock<M>::end_, TokenBlock<M>::At;

 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE StepBlock(M& m, const StepParams& p) : TokenBlock<M>(m, p), p_(p) {}

  HEED_DEVICE void Run() const {
    const float rate = Number<M>(p_.A, p_.A.At(0, 0, head_));
    const float bias = p_.bias.data == nullptr ? 0 : Number<M>(p_.bias, p_.bias.At(0, 0, head_));
    for (int64_t t = begin_ + m_.thread(); t < end_; t += kThreads) {
      float x = Number<M>(p_.dt, At(p_.dt, t)) + bias;
      if (p_.softplus) x = Softplus<M>(x);
      x = x < p_.low ? p_.low : x;  // keeps a NaN
      x = x > p_.high ? p_.high : x;
      Put<M>(p_.delta, At(p_.delta, t), x);
      Put<M>(p_.log_decay, At(p_.log_decay, t), x * rate);
    }
    if (p_.skip.data == nullptr || m_.block(0) != 0 || m_.block(2) != 0) return;
    for (int i = m_.thread(); i < p_.channels; i += kThreads) {
      Put<M>(p_.skip, p_.skip.At(0, 0, head_) + i, Number<M>(p_.D, p_.D.At(0, 0, head_) + i * p_.D.channel_stride));
    }
  }

 private:
  const StepParams& p_;
};

// The gradient of o = y .* silu(z): computes dz, and overwrites y with dy.
template <class M>
class GateBlock : TokenBlock<M> {
  using TokenBlock<M>::m_, TokenBlock<M>::begin_, TokenBlock<M>::end_, TokenBlock<M>::At;

 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE GateBlock(M& m, const GateParams& p) : TokenBlock<M>(m, p), p_(p) {}

  HEED_DEVICE void Run() const {
    for (int64_t i = begin_ * p_.channels + m_.thread(); i < end_ * p_.channels; i += kThreads) {
      const int64_t t = i / p_.channels, channel = i % p_.channels, at = At(p_.y, t) + channel;
      const float z = Number<M>(p_.z, At(p_.z, t) + channel), sigmoid = SigmoidsOf<M>(z).s;
      const float gradient = Number<M>(p_.d_o, At(p_.d_o, t) + channel);
      if (p_.dz.data != nullptr) {  // silu' = s (1 + z (1 - s))
        Put<M>(p_.dz, At(p_.dz, t) + channel, gradient * Number<M>(p_.y, at) * (sigmoid * (1 + z * (1 - sigmoid))));
      }
      Put<M>(p_.y, at, gradient * z * sigmoid);
    }
  }

 private:
  const GateParams& p_;
};

// Computes dx, ddt and partial sums over tokens from the gradients of values and log decays.
template <class M>
class FinishBlock : TokenBlock<M> {
  using TokenBlock<M>::m_, TokenBlock<M>::range_, TokenBlock<M>::head_, TokenBlock<M>::begin_, TokenBlock<M>::end_,
      TokenBlock<M>::At;

 public:
  static constexpr int kSharedBytes = 2 * kTokens * static_cast<int>(sizeof(float));

  HEED_DEVICE FinishBlock(M& m, const FinishParams& p) : TokenBlock<M>(m, p), p_(p) {}

  HEED_DEVICE void Run() const {
    if (begin_ >= range_.count) return;
    float* of_rates = reinterpret_cast<float*>(m_.shared());  // [kTokens]
    float* of_steps = of_rates + kTokens;
    const int lane = m_.thread() % heed::cuda::kWarp;
    for (int64_t t = begin_ + m_.thread() / heed::cuda::kWarp; t < end_; t += kThreads / heed::cuda::kWarp) {
      const float delta = Number<M>(p_.delta, At(p_.delta, t));
      float dot = 0;
      for (int i = lane; i < p_.channels; i += heed::cuda::kWarp) {
        const float dv = Number<M>(p_.dv, At(p_.dv, t) + i);
        dot += dv * Number<M>(p_.x, At(p_.x, t) + i);
        float dx = delta * dv;
        if (p_.skip.data != nullptr) dx += Skip(i) * Number<M>(p_.dy, At(p_.dy, t) + i);
        if (p_.dx.data != nullptr) Put<M>(p_.dx, At(p_.dx, t) + i, dx);
      }
      dot = heed::cuda::SumOfWarp(m_, dot);
      if (lane == 0) FinishToken(t, delta, dot, of_rates, of_steps);
    }
    m_.Sync();
    float* sums = p_.sums + ((range_.first_block + m_.block(0)) * p_.heads + head_) * (2 + p_.channels);
    for (int i = m_.thread(); i < 2 + p_.channels; i += kThreads) {
      float sum = 0;
      for (int64_t t = begin_; t < end_; ++t) {
        if (i < 2) {
          sum += (i == 0 ? of_rates : of_steps)[t - begin_];
        } else if (p_.skip.data != nullptr) {
          sum += Number<M>(p_.dy, At(p_.dy, t) + i - 2) * Number<M>(p_.x, At(p_.x, t) + i - 2);
        }
      }
      sums[i] = sum;
    }
  }

 private:
  HEED_DEVICE float Skip(int i) const { return Number<M>(p_.skip, p_.skip.At(0, 0, head_) + i); }
  HEED_DEVICE void FinishToken(int64_t t, float delta, float dot, float* of_rates, float* of_steps) const {
    const float decay_gradient = Number<M>(p_.d_log_decay, At(p_.d_log_decay, t));
    const float bias = p_.bias.data == nullptr ? 0 : Number<M>(p_.bias, p_.bias.At(0, 0, head_));
    const float x = Number<M>(p_.dt, At(p_.dt, t)) + bias, value = p_.softplus ? Softplus<M>(x) : x;
    float of_step = dot + Number<M>(p_.A, p_.A.At(0, 0, head_)) * decay_gradient;
    if (p_.softplus) of_step *= SigmoidsOf<M>(x).s;
    if (value < p_.low || value > p_.high) of_step = 0;
    if (p_.ddt.data != nullptr) Put<M>(p_.ddt, At(p_.ddt, t), of_step);
    of_rates[t - begin_] = delta * decay_gradient;
    of_steps[t - begin_] = of_step;
  }

  const FinishParams& p_;
};

template <class M>
class ClearBlock : TokenBlock<M> {
  using TokenBlock<M>::m_, TokenBlock<M>::begin_, TokenBlock<M>::end_, TokenBlock<M>::At;

 public:
  static constexpr int kSharedBytes = 0;

  HEED_DEVICE ClearBlock(M& m, const ClearParams& p) : TokenBlock<M>(m, p), p_(p) {}

  HEED_DEVICE void Run() const {
    for (int64_t t = begin_; t < end_; ++t) {
      for (int i = m_.thread(); i < p_.channels; i += kThreads) {
        if (p_.dx.data != nullptr) Put<M>(p_.dx, At(p_.dx, t) + i, 0);
        if (p_.dz.data != nullptr) Put<M>(p_.dz, At(p_.dz, t) + i, 0);
      }
      if (m_.thread() == 0 && p_.ddt.data != nullptr) Put<M>(p_.ddt, At(p_.ddt, t), 0);
    }
  }

 private:
  const ClearParams& p_;
};

// Sums a head's partial sums over all blocks of tokens, in order.
template <class M>
class TotalBlock {
 public:
  static constexpr int kSharedBytes = kThreads * static_cast<int>(sizeof(Sum));

  HEED_DEVICE TotalBlock(M& m, const TotalParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() const {
    const int head = m_.block(1), row = 2 + p_.channels;
    Sum* shares = reinterpret_cast<Sum*>(m_.shared());  // [kThreads]: sums of dD if it is one number per head
    Sum of_channels;
    for (int i = m_.thread(); i < row; i += kThreads) {
      Sum sum;
      for (int64_t block = 0; block < p_.blocks; ++block) {
        sum = sum + Sum{p_.sums[(block * p_.heads + head) * row + i], 0};
      }
      if (i < 2) {
        Store(i == 0 ? p_.dA : p_.dbias, head, 0, sum);
      } else if (p_.by_channel) {
        Store(p_.dD, head, i - 2, sum);
      } else {
        of_channels = of_channels + sum;
      }
    }
    if (p_.by_channel || p_.dD.data == nullptr) return;
    shares[m_.thread()] = of_channels;
    m_.Sync();
    if (m_.thread() != 0) return;
    Sum total;
    for (int i = 0; i < kThreads; ++i) total = total + shares[i];
    Store(p_.dD, head, 0, total);
  }

 private:
  HEED_DEVICE void Store(const DeviceView& v, int head, int channel, Sum sum) const {
    if (v.data != nullptr) Put<M>(v, v.At(0, 0, head) + channel * v.channel_stride, sum.high + sum.low);
  }

  M& m_;
  const TotalParams& p_;
};

// The launches that libheed_cuda has for this operation.
struct Launches {
  const char* (*steps)(const heed::cuda::Launch& launch, const StepParams& params);
  const char* (*gate)(const heed::cuda::Launch& launch, const GateParams& params);
  const char* (*finish)(const heed::cuda::Launch& launch, const FinishParams& params);
  const char* (*clear)(const heed::cuda::Launch& launch, const ClearParams& params);
  const char* (*total)(const heed::cuda::Launch& launch, const TotalParams& params);
};

}  // namespace heed::ssd::cuda

#endif  // HEED_OPS_SSM_SSD_CUDA_ELEMENT_BLOCKS_INTERNAL_H_
