// Small-M products of a few rows with many bf16 rows as they are stored: row_tile-inl.h for CPUs whose bf16 dot product
// outruns their f32 FMA.
//
// Compiled for such targets only. Each output is the same chain of dot products, in the same ascending order, as in
// pair_tile-inl.h, so both have the same bits.
#if defined(HEED_SIMD_PAIR_ROW_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_PAIR_ROW_TILE_INL_H_
#undef HEED_SIMD_PAIR_ROW_TILE_INL_H_
#else
#define HEED_SIMD_PAIR_ROW_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/simd/pair_tile-inl.h"
#include "heed/simd/row_tile-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Computes out[j][r] = sum_e rows_j[e] x_r[e] for B N rows from `begin` on, or for those that exist. x has words of two
// channels each, [pair][lane].
template <int R, int B, bool kWhole, class D>
HWY_INLINE void DotPairRowTile(D d, RowsInHand<BF16>& rows, size_t begin, size_t count, size_t depth,
                               const uint32_t* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D()), kStep = 2 * N;
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<uint16_t, D> halves;
  using V = hn::Vec<D>;
  if constexpr (kWhole) count = B * N;
  // Lanes beyond the last row repeat it.
  const auto row = [&](size_t i) HWY_ATTR {
    return reinterpret_cast<const uint16_t*>(rows[begin + (kWhole ? i : std::min(i, count - 1))]);
  };
  V sum[B][R];
  HWY_UNROLL(8)
  for (int b = 0; b < B; ++b) {
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) sum[b][r] = hn::Zero(d);
  }
  for (size_t e = 0; e < depth; e += kStep, x += N * N) {
    const size_t rest = std::min(kStep, depth - e);
    HWY_UNROLL(8)
    for (int b = 0; b < B; ++b) {
      rows.PrefetchVectors(d);
      const auto at = [&](size_t i) HWY_ATTR { return row(static_cast<size_t>(b) * N + i) + e; };
      const auto add = [&](size_t i, V column) HWY_ATTR {
        HWY_UNROLL(8)
        for (int r = 0; r < R; ++r) {
          sum[b][r] =
              DotPairs(d, hn::BitCast(words, column), hn::Set(words, x[i * N + static_cast<size_t>(r)]), sum[b][r]);
        }
      };
      if (rest == kStep) {
        ForWordColumns<(R > 4)>(d, at, add);
        continue;
      }
      V v[N];
      HWY_UNROLL(32)
      for (size_t i = 0; i < N; ++i) v[i] = hn::BitCast(d, hn::LoadN(halves, at(i), rest));
      Transpose(d, v);
      HWY_UNROLL(32)
      for (size_t i = 0; i < N && 2 * i < rest; ++i) add(i, v[i]);
    }
  }
  HWY_UNROLL(8)
  for (int b = 0; b < B; ++b) {
    const size_t first = static_cast<size_t>(b) * N;
    StoreColumns<R>(d, sum[b], kWhole ? N : count - first, out + (begin + first) * N);
  }
}

template <int R, class D>
HWY_NOINLINE void DotPairRows(D d, const StoredRows<BF16>& rows, size_t depth, const uint32_t* HWY_RESTRICT x,
                              float* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int B = R <= 4 ? 2 : 1;
  RowsInHand<BF16> in_hand(rows, depth);
  size_t begin = 0;
  for (; begin + B * N <= rows.count; begin += B * N) {
    DotPairRowTile<R, B, true>(d, in_hand, begin, B * N, depth, x, out);
  }
  for (; begin < rows.count; begin += N) {
    DotPairRowTile<R, 1, false>(d, in_hand, begin, std::min(N, rows.count - begin), depth, x, out);
  }
}

// Computes out[r][e] = out[r][e] factor[r] + sum_j weights[j][r] rows_j[e] over pairs of rows, starting from 0 if
// `clear`, for R rows r and C vectors of columns, or the first `columns` < N columns of one vector. `weights` has words
// of two rows each, [pair][lane]; the last row may be without a partner. With kSkipMasked, a weight of -0 leaves out
// unchanged even where a row is not finite.
template <int R, int C, bool kWhole, bool kSkipMasked, class D, class V = hn::Vec<D>>
HWY_INLINE void SumPairRowTile(D d, RowsInHand<BF16>& rows, size_t count, size_t column, size_t columns,
                               const uint32_t* HWY_RESTRICT weights, bool clear, const float* HWY_RESTRICT factor,
                               float* HWY_RESTRICT out, ptrdiff_t out_row) {
  static_assert(kWhole || C == 1);
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  const hn::Rebind<uint16_t, D> halves;
  const hn::Repartition<int16_t, D> signs;
  V acc[R][C];
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    const V f = hn::Set(d, factor[r]);
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      const float* at = out + r * out_row + static_cast<size_t>(c) * N;
      acc[r][c] = clear ? hn::Zero(d) : hn::Mul(hn::Load(d, at), f);
    }
  }
  const auto load = [&](size_t j, int c) HWY_ATTR {
    const auto* at = reinterpret_cast<const uint16_t*>(rows[j]) + column + static_cast<size_t>(c) * N;
    if (static_cast<size_t>(c) * N * sizeof(BF16) % 64 == 0) rows.PrefetchLine();
    return hn::PromoteTo(words, kWhole ? hn::LoadU(halves, at) : hn::LoadN(halves, at, columns));
  };
  for (size_t j = 0; j < count; j += 2, weights += N) {
    hn::Vec<decltype(words)> pairs[C];
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      pairs[c] = load(j, c);
      if (j + 1 < count) pairs[c] = hn::Or(pairs[c], hn::ShiftLeft<16>(load(j + 1, c)));
    }
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      const auto weight = hn::Set(words, weights[r]);
      HWY_UNROLL(8)
      for (int c = 0; c < C; ++c) {
        auto values = pairs[c];
        if constexpr (kSkipMasked) {
          const auto masked = hn::BitCast(words, hn::BroadcastSignBit(hn::BitCast(signs, weight)));
          values = hn::AndNot(masked, values);
        }
        acc[r][c] = DotPairs(d, values, weight, acc[r][c]);
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      hn::Store(acc[r][c], d, out + r * out_row + static_cast<size_t>(c) * N);
    }
  }
}

// Does this for all `columns`. Rows of `out` are padded to whole vectors.
template <int R, bool kSkipMasked, class D>
HWY_NOINLINE void SumPairRows(D d, const StoredRows<BF16>& rows, size_t columns, const uint32_t* HWY_RESTRICT weights,
                              bool clear, const float* HWY_RESTRICT factor, float* HWY_RESTRICT out,
                              ptrdiff_t out_row) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int kVectors = HWY_MAX(1, HWY_MIN(8, kVectorRegisters / 2 / R));
  RowsInHand<BF16> in_hand(rows, columns);
  ForTiles<kVectors>(0, columns / N, [&](auto vectors, size_t c) HWY_ATTR {
    SumPairRowTile<R, vectors.value, true, kSkipMasked>(d, in_hand, rows.count, c * N, 0, weights, clear, factor,
                                                        out + c * N, out_row);
  });
  const size_t whole = columns / N * N;
  if (whole == columns) return;
  SumPairRowTile<R, 1, false, kSkipMasked>(d, in_hand, rows.count, whole, columns - whole, weights, clear, factor,
                                           out + whole, out_row);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_PAIR_ROW_TILE_INL_H_
