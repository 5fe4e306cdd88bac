// Dot products of a few f32 rows with many of bytes, in digits (digits-inl.h): for CPUs that
// multiply four bytes by four others and add them up in one instruction.
//
// Compiled for such targets alone.
#if defined(HEED_SIMD_BYTE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_BYTE_TILE_INL_H_
#undef HEED_SIMD_BYTE_TILE_INL_H_
#else
#define HEED_SIMD_BYTE_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/simd/digits-inl.h"
#include "heed/simd/dot_products-inl.h"
#include "heed/simd/row_tile-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Digits as these products take them, for all lanes.
template <class D>
constexpr DigitLayout ByteLayout(D, size_t depth) {
  constexpr size_t N = hn::MaxLanes(D());
  return {DigitWords(depth), N, kDigits * N};
}

// out[j][r] = factors[j] sum_e rows_j[e] x_r[e] of B N rows from `begin` on, or of those
// that there are.
template <int R, int B, bool kWhole, class D>
HWY_INLINE void DotByteTile(D d, RowsInHand<int8_t>& rows, size_t begin, size_t count, size_t depth,
                            const int32_t* HWY_RESTRICT digits, const float* const* HWY_RESTRICT factors,
                            float* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr size_t kBytes = 4 * N;  // of a vector
  const hn::RebindToSigned<D> di;
  const hn::Repartition<int8_t, D> signed_bytes;
  const hn::Repartition<uint8_t, D> bytes;
  using V = hn::Vec<D>;
  using VI = hn::Vec<decltype(di)>;
  static_assert(R <= N);
  if constexpr (kWhole) count = B * N;
  const auto row = [&](size_t i) HWY_ATTR { return rows[begin + (kWhole ? i : std::min(i, count - 1))]; };
  const int32_t* HWY_RESTRICT starts = digits + ByteLayout(d, depth).Tail();
  VI sum[B][R][kDigits];
  HWY_UNROLL(4)
  for (int b = 0; b < B; ++b) {
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      HWY_UNROLL(3)
      for (int k = 0; k < kDigits; ++k) {
        sum[b][r][k] = StartOfDots(di, starts[static_cast<size_t>(k) * N + static_cast<size_t>(r)]);
      }
    }
  }
  const auto sign = hn::Set(bytes, uint8_t{0x80});
  for (size_t e = 0; e < depth; e += kBytes) {
    const size_t rest = std::min(kBytes, depth - e);
    HWY_UNROLL(4)
    for (int b = 0; b < B; ++b) {
      rows.PrefetchVectors(d);
      const auto at = [&](size_t i) HWY_ATTR { return row(static_cast<size_t>(b) * N + i) + e; };
      const int32_t* HWY_RESTRICT word = digits + e / 4 * kDigits * N;
      const auto add = [&](size_t i, V column) HWY_ATTR {
        const auto offset_bytes = hn::Xor(hn::BitCast(bytes, column), sign);
        HWY_UNROLL(8)
        for (int r = 0; r < R; ++r) {
          HWY_UNROLL(3)
          for (int k = 0; k < kDigits; ++k) {
            const size_t digit = (i * kDigits + static_cast<size_t>(k)) * N;
            const auto four = hn::BitCast(signed_bytes, hn::Set(di, word[digit + static_cast<size_t>(r)]));
            sum[b][r][k] = AddDots(di, offset_bytes, four, sum[b][r][k]);
          }
        }
      };
      if (rest == kBytes) {
        ForWordColumns<(R > 4)>(d, at, add);
        continue;
      }
      V v[N];
      HWY_UNROLL(32)
      for (size_t i = 0; i < N; ++i) v[i] = hn::BitCast(d, hn::LoadN(signed_bytes, at(i), rest));
      Transpose(d, v);
      HWY_UNROLL(32)
      for (size_t i = 0; i < N && 4 * i < rest; ++i) add(i, v[i]);
    }
  }
  const auto* HWY_RESTRICT units = reinterpret_cast<const float*>(starts + kDigits * N);
  HWY_UNROLL(4)
  for (int b = 0; b < B; ++b) {
    const size_t first = static_cast<size_t>(b) * N;
    HWY_ALIGN float factor_lanes[N] = {};
    for (size_t i = 0; i < N && first + i < count; ++i) factor_lanes[i] = *factors[begin + first + i];
    const V factor = hn::Load(d, factor_lanes);
    V by_row[R];
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      const float* row_units = units + r;
      by_row[r] = OfDigits(d, sum[b][r], hn::Set(d, row_units[0]), hn::Mul(factor, hn::Set(d, row_units[N])));
    }
    StoreColumns<R>(d, by_row, kWhole ? N : count - first, out + (begin + first) * N);
  }
}

// Does so for all rows: x as ToDigits() left it, rows_j times *factors[j].
template <int R, class D>
HWY_NOINLINE void DotByteRows(D d, const StoredRows<int8_t>& rows, size_t depth, const int32_t* HWY_RESTRICT digits,
                              const float* const* HWY_RESTRICT factors, float* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int B = R <= 2 ? 2 : 1;
  RowsInHand<int8_t> in_hand(rows, depth);
  size_t begin = 0;
  for (; begin + B * N <= rows.count; begin += B * N) {
    DotByteTile<R, B, true>(d, in_hand, begin, B * N, depth, digits, factors, out);
  }
  for (; begin < rows.count; begin += N) {
    DotByteTile<R, 1, false>(d, in_hand, begin, std::min(N, rows.count - begin), depth, digits, factors, out);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_BYTE_TILE_INL_H_
