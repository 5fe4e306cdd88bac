// Register-tiled products of a few broadcast rows with a few vectors of lanes.
//
// Compiled once per SIMD target. Both products of attention have one shape: a
// row-major matrix is read in place as scalar broadcasts, the other operand has
// its rows in lanes. One FMA of 2 flops per lane and cycle port is the bound: R C
// accumulators hide its latency, R + C loads feed R C of them.
//
// Each output is one chain of fused products in ascending order, whatever R and
// C are: the tile shape never shows in the bits.
#if defined(HEED_SIMD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_TILE_INL_H_
#undef HEED_SIMD_TILE_INL_H_
#else
#define HEED_SIMD_TILE_INL_H_
#endif

#include <cstddef>

#include "heed/simd/shapes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Not into L1: rows a power of two apart would evict each other from its few sets.
HWY_INLINE void PrefetchToL2(const void* at) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(at, 0, 2);
#else
  hwy::Prefetch(at);
#endif
}

// s[r][c] = finish(sum_e k[r][e] q[e][c], r, c), e ascending, and max[c] =
// max(max[c], s[.][c]). `stride` elements between rows of q and of s.
template <int R, int C, class D, class F, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void LogitTile(D d, const T* HWY_RESTRICT q, size_t stride, const T* HWY_RESTRICT k, ptrdiff_t k_stride,
                          size_t depth, T* HWY_RESTRICT s, V* HWY_RESTRICT max, const F& finish) {
  constexpr size_t N = hn::MaxLanes(D());
  V acc[R][C];
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Zero(d);
  }
  for (size_t e = 0; e < depth; ++e) {
    V lanes[C];
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      lanes[c] = hn::Load(d, q + e * stride + static_cast<size_t>(c) * N);
    }
    HWY_UNROLL(32)
    for (int r = 0; r < R; ++r) {
      const V row = hn::Set(d, k[r * k_stride + static_cast<ptrdiff_t>(e)]);
      HWY_UNROLL(32)
      for (int c = 0; c < C; ++c) acc[r][c] = hn::MulAdd(row, lanes[c], acc[r][c]);
    }
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      const V x = finish(acc[r][c], r, c);
      hn::Store(x, d, s + static_cast<size_t>(r) * stride + static_cast<size_t>(c) * N);
      max[c] = hn::Max(x, max[c]);
    }
  }
}

// o[r][c] = o[r][c] * rescale[c] + sum_j v[j][r] p[j][c], j ascending, and from
// zero if `first`. With kSkipMasked, a weight of -0 leaves o as it is even where
// v is not finite.
template <int R, int C, bool kSkipMasked, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void ValueTile(D d, const T* HWY_RESTRICT p, size_t stride, const T* HWY_RESTRICT v, ptrdiff_t v_stride,
                          size_t num_keys, bool first, const V* HWY_RESTRICT rescale, T* HWY_RESTRICT o) {
  constexpr size_t N = hn::MaxLanes(D());
  V acc[R][C];
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      const T* at = o + static_cast<size_t>(r) * stride + static_cast<size_t>(c) * N;
      acc[r][c] = first ? hn::Zero(d) : hn::Mul(hn::Load(d, at), rescale[c]);
    }
  }
  for (size_t j = 0; j < num_keys; ++j) {
    V lanes[C];
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      lanes[c] = hn::Load(d, p + j * stride + static_cast<size_t>(c) * N);
    }
    const T* HWY_RESTRICT values = v + static_cast<ptrdiff_t>(j) * v_stride;
    HWY_UNROLL(32)
    for (int r = 0; r < R; ++r) {
      const V value = hn::Set(d, values[r]);
      HWY_UNROLL(32)
      for (int c = 0; c < C; ++c) {
        if constexpr (kSkipMasked) {
          const hn::RebindToSigned<D> di;
          const auto masked = hn::MaskFromVec(hn::BitCast(d, hn::BroadcastSignBit(hn::BitCast(di, lanes[c]))));
          acc[r][c] = hn::MulAdd(hn::IfThenZeroElse(masked, value), lanes[c], acc[r][c]);
        } else {
          acc[r][c] = hn::MulAdd(value, lanes[c], acc[r][c]);
        }
      }
    }
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      hn::Store(acc[r][c], d, o + static_cast<size_t>(r) * stride + static_cast<size_t>(c) * N);
    }
  }
}

// out[r][c] += sum_i a[r][i] b[i][c], i ascending, where a[r][i] is
// a[r a_row + i a_step] and b[i] a row of vectors. With kSkipMasked, an a of -0
// leaves out as it is even where b is not finite.
template <int R, int C, bool kSkipMasked, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void AccumulateTile(D d, const T* HWY_RESTRICT a, ptrdiff_t a_row, ptrdiff_t a_step, const T* HWY_RESTRICT b,
                               ptrdiff_t b_step, size_t count, T* HWY_RESTRICT out, ptrdiff_t out_row) {
  constexpr ptrdiff_t N = hn::MaxLanes(D());
  V acc[R][C];
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Load(d, out + r * out_row + c * N);
  }
  for (size_t i = 0; i < count; ++i, a += a_step, b += b_step) {
    V row[C];
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) row[c] = hn::Load(d, b + c * N);
    HWY_UNROLL(32)
    for (int r = 0; r < R; ++r) {
      const V factor = hn::Set(d, a[r * a_row]);
      HWY_UNROLL(32)
      for (int c = 0; c < C; ++c) {
        if constexpr (kSkipMasked) {
          const hn::RebindToUnsigned<D> du;
          const auto masked = hn::RebindMask(d, hn::Eq(hn::BitCast(du, factor), hn::BitCast(du, hn::Set(d, T{-0.0}))));
          acc[r][c] = hn::MulAdd(factor, hn::IfThenZeroElse(masked, row[c]), acc[r][c]);
        } else {
          acc[r][c] = hn::MulAdd(factor, row[c], acc[r][c]);
        }
      }
    }
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) hn::Store(acc[r][c], d, out + r * out_row + c * N);
  }
}

// All of [0, count) by tiles of R, then of fewer, down to 1:
// f(std::integral_constant<int, R>, begin).
template <int R, class F>
HWY_INLINE void ForTiles(size_t begin, size_t count, const F& f) {
  size_t i = begin;
  for (; i + R <= count; i += R) f(std::integral_constant<int, R>(), i);
  if constexpr (R > 1) {
    if (i < count) ForTiles<FewerRows<R>()>(i, count, f);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_TILE_INL_H_
