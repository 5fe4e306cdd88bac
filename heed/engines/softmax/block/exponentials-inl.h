// The exponentials of a tile of logits, and dropout applied to them.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_EXPONENTIALS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_EXPONENTIALS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_EXPONENTIALS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_EXPONENTIALS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/block/lanes-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/philox-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Returns e^x for x <= 0, the difference of a logit and a maximum.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Weight(D d, V difference) {
  return hs::Exp2NonPositive(d, hn::Mul(difference, hn::Set(d, static_cast<hn::TFromD<D>>(hs::kLog2E))));
}

// Computes p = exp(s - shift) and sum += p, with ascending keys, and calls put(p, key, vector) for kStep keys at a
// time; a missing last key has p = 0. With kFlagMasked, masked pairs get p = -0, which the second product can tell from
// an exponential that underflowed.
template <size_t W, int C, int kStep, bool kFlagMasked, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>,
          class Put>
HWY_INLINE void Exponentials(D d, size_t num_keys, const T* s, const V* HWY_RESTRICT shift, V* HWY_RESTRICT sum,
                             const Put& put) {
  constexpr size_t N = hn::MaxLanes(D());
  V l[C], m[C];
  HWY_UNROLL(32)
  for (int c = 0; c < C; ++c) {
    l[c] = sum[c];
    m[c] = shift[c];
  }
  const auto exponential = [&](size_t j, int c) HWY_ATTR {
    const V x = hn::Load(d, s + j * W + static_cast<size_t>(c) * N);
    V p = Weight(d, hn::Sub(x, m[c]));
    if constexpr (kFlagMasked) {
      const auto masked = hn::Eq(x, hn::Set(d, -std::numeric_limits<T>::infinity()));
      p = hn::IfThenElse(masked, hn::Set(d, T{-0.0}), p);
    }
    l[c] = hn::Add(l[c], p);
    return p;
  };
  size_t j = 0;
  for (; j + kStep <= num_keys; j += kStep) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      V p[kStep];
      HWY_UNROLL(2)
      for (int i = 0; i < kStep; ++i) p[i] = exponential(j + static_cast<size_t>(i), c);
      put(p, j, c);
    }
  }
  if constexpr (kStep == 2) {
    for (int c = 0; j < num_keys && c < C; ++c) {
      const V p[2] = {exponential(j, c), hn::Zero(d)};
      put(p, j, c);
    }
  }
  HWY_UNROLL(32)
  for (int c = 0; c < C; ++c) sum[c] = l[c];
}

// Zeroes P of dropped pairs. Masked pairs keep their flag -0.
template <size_t W, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ApplyDropout(D /*d*/, const Run& run, int64_t origin, const Problem& problem,
                               const Lanes<T, W>& lanes, T* HWY_RESTRICT s) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::Rebind<uint32_t, D> du;
  for (size_t c = run.c0; c < run.c1; ++c) {
    const auto position = hn::Load(du, lanes.position_low + c * N);
    const auto head_row = hn::Load(du, lanes.head_row + c * N);
    HWY_ALIGN uint32_t words[4][N];
    for (int64_t j = run.begin; j < run.end; ++j) {
      if (j == run.begin || j % 4 == 0) {
        hn::Vec<decltype(du)> w[4];
        hs::Philox(du, static_cast<uint32_t>(j >> 2), position, head_row, problem.dropout_offset, problem.key_low,
                   problem.key_high, w);
        for (int i = 0; i < 4; ++i) hn::Store(w[i], du, words[i]);
      }
      T* at = s + static_cast<size_t>(j - origin) * W + c * N;
      for (size_t i = 0; i < N; ++i) {
        if (words[j % 4][i] >= problem.keep_below && at[i] != 0) at[i] = 0;
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_EXPONENTIALS_INL_H_
