// Register-tiled products by the bf16 dot product: the counterpart of tile-inl.h for CPUs whose bf16 dot product
// outruns their f32 FMA.
//
// Compiled for such targets only (pair_products-inl.h). Each output is one chain of dot products in ascending order,
// two at a time where tiles have BFMMLA.
#if defined(HEED_SIMD_PAIR_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_PAIR_TILE_INL_H_
#undef HEED_SIMD_PAIR_TILE_INL_H_
#else
#define HEED_SIMD_PAIR_TILE_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/dtype.h"
#include "heed/simd/pair_products-inl.h"
#include "heed/simd/quad_tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Arranges rows of words, in place, as LogitPairTile takes q, and ValuePairTile without kSkipMasked p.
template <class D>
HWY_INLINE void ArrangeLanes([[maybe_unused]] D d, [[maybe_unused]] uint32_t* HWY_RESTRICT rows,
                             [[maybe_unused]] size_t stride, [[maybe_unused]] size_t num_rows,
                             [[maybe_unused]] size_t lanes) {
#if HEED_QUAD_PRODUCTS
  ToQuads(d, rows, stride, num_rows, lanes);
#endif
}

// Computes s[r][c] = finish(sum_e k[r][e] q[e][c], r, c) and max[c] = max(max[c], s[.][c]). k has rows of `depth` bf16,
// q has ceil(depth / 2) rows of words of two channels each, which ArrangeLanes() has seen.
template <int R, int C, class D, class F, class V = hn::Vec<D>>
HWY_INLINE void LogitPairTile(D d, const uint32_t* HWY_RESTRICT q, size_t stride, const BF16* HWY_RESTRICT k,
                              ptrdiff_t k_stride, size_t depth, float* HWY_RESTRICT s, V* HWY_RESTRICT max,
                              const F& finish) {
  constexpr size_t N = hn::MaxLanes(D());
#if HEED_QUAD_PRODUCTS
  return LogitQuadTile<R, C>(d, q, stride, k, k_stride, depth, s, max, finish);
#endif
  const hn::RebindToUnsigned<D> words;
  V acc[R][C];
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Zero(d);
  }
  const auto step = [&](size_t pair, const auto& word_of_row) HWY_ATTR {
    hn::Vec<decltype(words)> lanes[C];
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      lanes[c] = hn::Load(words, q + pair * stride + static_cast<size_t>(c) * N);
    }
    HWY_UNROLL(32)
    for (int r = 0; r < R; ++r) {
      const auto row = hn::Set(words, word_of_row(k + r * k_stride + 2 * pair));
      HWY_UNROLL(32)
      for (int c = 0; c < C; ++c) acc[r][c] = DotPairs(d, row, lanes[c], acc[r][c]);
    }
  };
  for (size_t pair = 0; pair < depth / 2; ++pair) {
    step(pair, [](const BF16* at) HWY_ATTR {
      uint32_t word;
      std::memcpy(&word, at, sizeof(word));
      return word;
    });
  }
  if (depth % 2 != 0) {
    step(depth / 2, [](const BF16* at) HWY_ATTR { return uint32_t{at->bits}; });
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

// Computes o[r][c] = o[r][c] * rescale[c] + sum_j v[j][r] p[j][c] over pairs of keys j, starting from 0 if `first`.
// ArrangeLanes() has seen p, except with kSkipMasked, where p = -0 leaves o unchanged even where v is not finite.
template <int R, int C, bool kSkipMasked, class D, class V = hn::Vec<D>>
HWY_INLINE void ValuePairTile(D d, const uint32_t* HWY_RESTRICT p, size_t stride, const uint32_t* HWY_RESTRICT v,
                              ptrdiff_t v_stride, size_t num_pairs, bool first, const V* HWY_RESTRICT rescale,
                              float* HWY_RESTRICT o) {
  constexpr size_t N = hn::MaxLanes(D());
#if HEED_QUAD_PRODUCTS
  if constexpr (!kSkipMasked) {
    return ValueQuadTile<R, C>(d, p, stride, v, v_stride, num_pairs, first, rescale, o);
  }
#endif
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<int16_t, D> halves;
  V acc[R][C];
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      const float* at = o + static_cast<size_t>(r) * stride + static_cast<size_t>(c) * N;
      acc[r][c] = first ? hn::Zero(d) : hn::Mul(hn::Load(d, at), rescale[c]);
    }
  }
  for (size_t j = 0; j < num_pairs; ++j) {
    hn::Vec<decltype(words)> lanes[C];
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      lanes[c] = hn::Load(words, p + j * stride + static_cast<size_t>(c) * N);
    }
    const uint32_t* HWY_RESTRICT values = v + static_cast<ptrdiff_t>(j) * v_stride;
    HWY_UNROLL(32)
    for (int r = 0; r < R; ++r) {
      const auto value = hn::Set(words, values[r]);
      HWY_UNROLL(32)
      for (int c = 0; c < C; ++c) {
        if constexpr (kSkipMasked) {
          const auto masked = hn::BitCast(words, hn::BroadcastSignBit(hn::BitCast(halves, lanes[c])));
          acc[r][c] = DotPairs(d, hn::AndNot(masked, value), lanes[c], acc[r][c]);
        } else {
          acc[r][c] = DotPairs(d, value, lanes[c], acc[r][c]);
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

// Words of a row that AccumulatePairTile takes per step, as quads if there are two.
inline constexpr int kStepWords = HEED_QUAD_PRODUCTS ? 2 : 1;

// Computes out[r][c] += sum_i a[r][i] b[i][c] over `count` steps i: words of two products each, a[r][i] at a + r a_row
// + i a_step. With quads, those of rows r and r + 1 are at a + r a_row + i a_step for even r, and b has been through
// ToQuads(). With kSkipMasked, an element -0 of a leaves out unchanged even where b is not finite.
template <int R, int C, bool kSkipMasked, class D, class V = hn::Vec<D>>
HWY_INLINE void AccumulatePairTile(D d, const uint32_t* HWY_RESTRICT a, ptrdiff_t a_row, ptrdiff_t a_step,
                                   const uint32_t* HWY_RESTRICT b, ptrdiff_t b_step, size_t count,
                                   float* HWY_RESTRICT out, ptrdiff_t out_row) {
#if HEED_QUAD_PRODUCTS
  return AccumulateQuadTile<R, C, kSkipMasked>(d, a, a_row, a_step, b, b_step, count, out, out_row);
#endif
  constexpr ptrdiff_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<uint16_t, D> halves;
  V acc[R][C];
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Load(d, out + r * out_row + c * N);
  }
  for (size_t i = 0; i < count; ++i, a += a_step, b += b_step) {
    hn::Vec<decltype(words)> row[C];
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) row[c] = hn::Load(words, b + c * N);
    HWY_UNROLL(32)
    for (int r = 0; r < R; ++r) {
      const auto factor = hn::Set(words, a[r * a_row]);
      HWY_UNROLL(32)
      for (int c = 0; c < C; ++c) {
        if constexpr (kSkipMasked) {
          const auto masked = hn::BitCast(
              words, hn::VecFromMask(halves, hn::Eq(hn::BitCast(halves, factor), hn::Set(halves, uint16_t{0x8000}))));
          acc[r][c] = DotPairs(d, factor, hn::AndNot(masked, row[c]), acc[r][c]);
        } else {
          acc[r][c] = DotPairs(d, factor, row[c], acc[r][c]);
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_PAIR_TILE_INL_H_
