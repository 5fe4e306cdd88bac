// Matrix products of the tokens of a chunk, in register tiles, and the rows that they read and write.
//
// Compiled once per SIMD target. Every output is one chain of FMAs in ascending order (tile-inl.h). Rows are whole
// vectors, with zeros beyond their elements. Pair matrices have a row per token that reads and a column per token that
// is read; those of later tokens are -0, which leaves outputs unchanged even where a later token is NaN.
#if defined(HEED_SIMD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_PRODUCTS_INL_H_
#undef HEED_SIMD_PRODUCTS_INL_H_
#else
#define HEED_SIMD_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/simd/convert-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// out[i][j] += sum_l a[i a_row + l a_step] b[l][j], l ascending, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Multiply(D d, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step, int64_t count,
                           int64_t rows, int64_t columns, T* out, int64_t out_row) {
  constexpr size_t N = hn::MaxLanes(D());
  const size_t vectors = (static_cast<size_t>(columns) + N - 1) / N;
  ForTiles<kShapes.tile_vectors>(0, vectors, [&](auto c, size_t j) HWY_ATTR {
    ForTiles<TileRows<c.value>()>(0, static_cast<size_t>(rows), [&](auto r, size_t i) HWY_ATTR {
      const auto at = static_cast<int64_t>(i);
      AccumulateTile<r.value, c.value, false>(d, a + at * a_row, a_row, a_step, b + j * N, b_step,
                                              static_cast<size_t>(count), out + at * out_row + j * N, out_row);
    });
  });
}

// Products of rows with columns up to their own, at least: out[i][r] = <a_i, b_r> for r <= i; the rest of a row is
// other products or 0. Rows of bT and out have `row` elements, at least as many as there are tokens.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void MultiplyPairs(D d, const T* a, int64_t a_row, const T* bT, int64_t count, int64_t tokens, T* out,
                                int64_t row) {
  constexpr size_t N = hn::MaxLanes(D());
  std::memset(out, 0, static_cast<size_t>(tokens * row) * sizeof(T));
  ForTiles<kShapes.tile_vectors>(0, (static_cast<size_t>(tokens) + N - 1) / N, [&](auto c, size_t j) HWY_ATTR {
    const size_t first = j * N;  // rows before it have no column here
    ForTiles<TileRows<c.value>()>(first, static_cast<size_t>(tokens), [&](auto r, size_t i) HWY_ATTR {
      const auto at = static_cast<int64_t>(i);
      AccumulateTile<r.value, c.value, false>(d, a + at * a_row, a_row, 1, bT + j * N, row, static_cast<size_t>(count),
                                              out + at * row + j * N, row);
    });
  });
}

// out[i] += sum over l <= i of a[i][l] b[l], with a[i][l] = -0 for l > i.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void MultiplyLower(D d, const T* a, int64_t a_row, const T* b, int64_t b_step, int64_t tokens,
                                int64_t columns, T* out, int64_t out_row) {
  constexpr size_t N = hn::MaxLanes(D());
  const size_t vectors = (static_cast<size_t>(columns) + N - 1) / N;
  ForTiles<kShapes.tile_vectors>(0, vectors, [&](auto c, size_t j) HWY_ATTR {
    ForTiles<TileRows<c.value>()>(0, static_cast<size_t>(tokens), [&](auto r, size_t i) HWY_ATTR {
      const auto at = static_cast<int64_t>(i);
      T* to = out + at * out_row + j * N;
      const T *from = b + j * N, *row = a + at * a_row;
      AccumulateTile<r.value, c.value, false>(d, row, a_row, 1, from, b_step, i, to, out_row);
      AccumulateTile<r.value, c.value, true>(d, row + at, a_row, 1, from + at * b_step, b_step,
                                             static_cast<size_t>(r.value), to, out_row);
    });
  });
}

// out[l] += sum over i >= l of a[i][l] b[i], with the same a.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void MultiplyUpper(D d, const T* a, int64_t a_row, const T* b, int64_t b_step, int64_t tokens,
                                int64_t columns, T* out, int64_t out_row) {
  constexpr size_t N = hn::MaxLanes(D());
  const size_t vectors = (static_cast<size_t>(columns) + N - 1) / N;
  ForTiles<kShapes.tile_vectors>(0, vectors, [&](auto c, size_t j) HWY_ATTR {
    ForTiles<TileRows<c.value>()>(0, static_cast<size_t>(tokens), [&](auto r, size_t l) HWY_ATTR {
      const auto at = static_cast<int64_t>(l), after = at + static_cast<int64_t>(r.value);
      T* to = out + at * out_row + j * N;
      const T *column = a + at, *from = b + j * N;
      AccumulateTile<r.value, c.value, true>(d, column + at * a_row, 1, a_row, from + at * b_step, b_step,
                                             static_cast<size_t>(r.value), to, out_row);
      AccumulateTile<r.value, c.value, false>(d, column + after * a_row, 1, a_row, from + after * b_step, b_step,
                                              static_cast<size_t>(tokens - after), to, out_row);
    });
  });
}

// `to` has whole vectors, with zeros beyond n.
template <class D, class S, class T = hn::TFromD<D>>
HWY_INLINE void LoadRow(D d, const S* from, int64_t n, int64_t padded, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t i = 0; i < padded; i += N) {
    const int64_t left = n - i;
    hn::Store(left <= 0 ? hn::Zero(d) : LoadWideN(d, from + i, static_cast<size_t>(std::min(left, N))), d, to + i);
  }
}
template <class D, class S, class T = hn::TFromD<D>>
HWY_INLINE void StoreRow(D d, const T* from, int64_t n, S* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t i = 0; i < n; i += N) {
    StoreRounded(d, hn::LoadU(d, from + i), to + i, static_cast<size_t>(std::min(N, n - i)));
  }
}

// Rows of `to` have to_row elements; those beyond the tokens are zeros.
template <class T>
HWY_INLINE void TransposeRows(const T* from, int64_t row, int64_t tokens, int64_t channels, T* to, int64_t to_row) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = 0; i < tokens; ++i) to[c * to_row + i] = from[i * row + c];
    std::fill(to + c * to_row + tokens, to + (c + 1) * to_row, T{0});
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_PRODUCTS_INL_H_
