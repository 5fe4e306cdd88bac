// Transposes of N x N elements held in N vectors, where N is the number of lanes.
//
// Compiled once per SIMD target. log2(N) stages of two-input shuffles: first within 128-bit blocks, then of whole
// blocks.
#if defined(HEED_SIMD_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_TRANSPOSE_INL_H_
#undef HEED_SIMD_TRANSPOSE_INL_H_
#else
#define HEED_SIMD_TRANSPOSE_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The four (two, one) blocks of 4 (2, 1) vectors, transposed.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void TransposeBlocks(D d, V* HWY_RESTRICT v, size_t step) {
  constexpr size_t kBlocks = hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) / 16;
  if constexpr (kBlocks == 2) {
    const V a = v[0], b = v[step];
    v[0] = hn::ConcatLowerLower(d, b, a);
    v[step] = hn::ConcatUpperUpper(d, b, a);
  } else if constexpr (kBlocks == 4) {
    const V a = v[0], b = v[step], c = v[2 * step], e = v[3 * step];
    const V even_ab = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
    const V odd_ab = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
    const V even_ce = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(e), c);
    const V odd_ce = hn::OddEvenBlocks(e, hn::SwapAdjacentBlocks(c));
    v[0] = hn::ConcatLowerLower(d, even_ce, even_ab);
    v[step] = hn::ConcatLowerLower(d, odd_ce, odd_ab);
    v[2 * step] = hn::ConcatUpperUpper(d, even_ce, even_ab);
    v[3 * step] = hn::ConcatUpperUpper(d, odd_ce, odd_ab);
  }
}

// Moves v[i] lane j to v[j] lane i.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void Transpose(D d, V* HWY_RESTRICT v) {
  constexpr size_t N = hn::MaxLanes(D());
  if constexpr (N == 1) return;
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    HWY_UNROLL(32)
    for (size_t i = 0; i < N; i += 2) {
      const V a = v[i], b = v[i + 1];
      v[i] = hn::InterleaveLower(d, a, b);
      v[i + 1] = hn::InterleaveUpper(d, a, b);
    }
    HWY_UNROLL(32)
    for (size_t i = 0; i < 2; ++i) TransposeBlocks(d, v + i, 2);
  } else {
    const hn::Repartition<double, D> wide;
    HWY_UNROLL(32)
    for (size_t i = 0; i < N; i += 4) {
      const auto ab0 = hn::BitCast(wide, hn::InterleaveLower(d, v[i], v[i + 1]));
      const auto ab1 = hn::BitCast(wide, hn::InterleaveUpper(d, v[i], v[i + 1]));
      const auto ce0 = hn::BitCast(wide, hn::InterleaveLower(d, v[i + 2], v[i + 3]));
      const auto ce1 = hn::BitCast(wide, hn::InterleaveUpper(d, v[i + 2], v[i + 3]));
      v[i] = hn::BitCast(d, hn::InterleaveLower(wide, ab0, ce0));
      v[i + 1] = hn::BitCast(d, hn::InterleaveUpper(wide, ab0, ce0));
      v[i + 2] = hn::BitCast(d, hn::InterleaveLower(wide, ab1, ce1));
      v[i + 3] = hn::BitCast(d, hn::InterleaveUpper(wide, ab1, ce1));
    }
    HWY_UNROLL(32)
    for (size_t i = 0; i < 4; ++i) TransposeBlocks(d, v + i, 4);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_TRANSPOSE_INL_H_
