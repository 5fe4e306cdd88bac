// Terms of rows for the backward pass of attention on a GPU, and sums of row terms, which are gradients.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_TERM_BLOCKS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_TERM_BLOCKS_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/numbers.h"
#include "heed/engines/softmax/cuda/backward_params.h"
#include "heed/engines/softmax/cuda/pair_logits.h"

namespace heed::softmax::cuda {

inline constexpr int kTermsThreads = 128;
inline constexpr int kTermsRows = kTermsThreads / heed::cuda::kWarp;

// Computes terms of rows, one warp per row. With a learned sink, -(1 - w) <d_o, o> is the row's term of its gradient.
template <class M>
class TermsBlock {
 public:
  HEED_DEVICE TermsBlock(M& m, const BackwardParams& p)
      : m_(m), p_(p), f_(p.forward), s_(f_.sequences[m.block(2)]), g_(p.gradients[m.block(2)]) {}

  HEED_DEVICE void Run() {
    const int lane = m_.thread() % heed::cuda::kWarp, head = m_.block(1);
    const int query = m_.block(0) * kTermsRows + m_.thread() / heed::cuda::kWarp;
    float sum = 0;
    const bool exists = query < s_.num_queries;  // the same in all threads of a warp
    if (exists) {
      const int64_t o = s_.o + query * f_.o_strides.token + head * f_.o_strides.head;
      const int64_t d_o = g_.d_o + query * p_.d_o_strides.token + head * p_.d_o_strides.head;
      for (int e = lane; e < f_.value_depth; e += heed::cuda::kWarp) {
        sum += heed::cuda::LoadFloat<M>(f_.o, f_.dtype, o + e) * heed::cuda::LoadFloat<M>(p_.d_o, f_.dtype, d_o + e);
      }
    }
    sum = heed::cuda::SumOfWarp(m_, sum);
    if (!exists || lane != 0) return;
    const int64_t term = p_.TermAt(g_, query, head);
    const float lse = f_.lse[s_.lse + query * f_.lse_strides.token + head * f_.lse_strides.head];
    const bool has_keys = lse != -INFINITY;
    if (!has_keys) sum = 0;  // whatever d_o is
    float w = 1, rest = 0;   // probability that the sink leaves, and takes
    if (f_.sinks.data != nullptr && has_keys) {
      const auto shares = heed::cuda::SigmoidsOf<M>(lse - NumberOf<M>(f_.sinks, 0, head));
      w = shares.s;
      rest = shares.complement;
    }
    if (p_.sink_terms != nullptr) p_.sink_terms[term] = -rest * sum;
    float delta = w * sum;
    if (p_.d_lse != nullptr) {
      delta -= p_.d_lse[g_.d_lse + query * p_.d_lse_strides.token + head * p_.d_lse_strides.head];
    }
    const float slope = f_.slopes.data == nullptr ? 0 : NumberOf<M>(f_.slopes, s_.slopes, head);
    p_.terms[term] = {lse, w / (1 - f_.dropout), delta, slope};
  }

 private:
  M& m_;
  const BackwardParams& p_;
  const ForwardParams& f_;
  const DeviceSequence& s_;
  const DeviceGradients& g_;
};

// Computes sum block(1) of the terms of head block(0), in double.
template <class M>
class HeadSumsBlock {
 public:
  static constexpr int kThreads = 256, kSharedBytes = kThreads * 8;

  HEED_DEVICE HeadSumsBlock(M& m, const HeadSumsParams& p) : m_(m), p_(p) {}

  HEED_DEVICE void Run() {
    const int head = m_.block(0), sum = m_.block(1), thread = m_.thread();
    double* const sums = reinterpret_cast<double*>(m_.shared());
    double mine = 0;
    for (int64_t row = p_.offsets[sum] + thread; row < p_.offsets[sum + 1]; row += kThreads) {
      mine += p_.terms[head * p_.num_rows + row];
    }
    sums[thread] = mine;
    for (int half = kThreads / 2; half > 0; half /= 2) {
      m_.Sync();
      if (thread < half) sums[thread] += sums[thread + half];
    }
    if (thread == 0) {
      heed::cuda::StoreFloat<M>(p_.sums, p_.dtype, sum * p_.stride + head * p_.head_stride,
                                static_cast<float>(sums[0]));
    }
  }

 private:
  M& m_;
  const HeadSumsParams& p_;
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_TERM_BLOCKS_H_
