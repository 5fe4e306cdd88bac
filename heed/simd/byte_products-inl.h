// Products of a few f32 rows with many int8 rows in AMX tiles, with the f32 rows as digits (digits-inl.h): up to 16
// rows for the work of one.
//
// Compiled once per SIMD target that has AMX or emulates it.
//
//   dot products     sums[digit][key][row]  a: 16 keys of 64 bytes     b: a digit of the rows
//   weighted sums    sums[digit][row][dim]  a: a digit of the weights  b: dims of 64 keys
//
// Sums are integers, so that bits do not depend on what else is computed: dot products have the bits of
// byte_tile-inl.h. A row's weights have a unit per 64 keys, so that its sum is as exact as in f32, which loses half a
// unit with every key.
#if defined(HEED_SIMD_BYTE_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_BYTE_PRODUCTS_INL_H_
#undef HEED_SIMD_BYTE_PRODUCTS_INL_H_
#else
#define HEED_SIMD_BYTE_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "heed/simd/digits-inl.h"
#include "heed/simd/row_tile-inl.h"
#include "heed/simd/amx.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Keeps AMX awake: it sleeps after about 400 ns without a product, and waking takes 250 ns. A dummy product in the
// middle of long vector passes costs 4 ns.
template <class Tiles>
HWY_INLINE void KeepAwake() {
  Tiles::template AddByteProducts<0, 6, 7>();
}

// Digits of up to 16 rows, side by side: one tile holds those of five rows, two those of ten.
inline constexpr size_t kDigitColumns = kDigits * kTileWords;
constexpr DigitLayout TileLayout(size_t depth, size_t num_rows) {
  return {(DigitWords(depth) + kTileRows - 1) / kTileRows * kTileRows, num_rows, kDigitColumns};
}

// Calls f with the number of tiles that hold the digits of these rows, as an integral constant.
template <class F>
HWY_INLINE void WithDigitTiles(size_t num_rows, const F& f) {
  const size_t columns = kDigits * num_rows;
  if (columns <= kTileWords) return f(std::integral_constant<int, 1>());
  if (columns <= 2 * kTileWords) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 3>());
}

// Digit sums of up to 16 rows from `begin` on, sums[row][column], in tiles from kFirst on. Rows that are `stride` bytes
// apart are read in place, others are copied.
template <class Tiles, int kTiles, int kFirst, class D>
HWY_INLINE void DigitSums(D d, RowsInHand<int8_t>& rows, size_t begin, size_t count, ptrdiff_t stride, size_t depth,
                          const int32_t* HWY_RESTRICT digits, int32_t* HWY_RESTRICT sums) {
  constexpr size_t kBytes = 4 * kTileWords;
  bool in_place = count == kTileRows;
  for (size_t i = 1; in_place && i < count; ++i) {
    in_place = rows[begin + i] - rows[begin + i - 1] == stride;
  }
  alignas(64) int8_t copy[kTileRows][kBytes];
  Tiles::template Zero<kFirst>();
  if constexpr (kTiles > 1) Tiles::template Zero<kFirst + 1>();
  if constexpr (kTiles > 2) Tiles::template Zero<kFirst + 2>();
  for (size_t e = 0; e < depth; e += kBytes) {
    for (size_t i = 0; i < kTileRows; i += hn::MaxLanes(D())) rows.PrefetchVectors(d);
    if (in_place && depth - e >= kBytes) {
      Tiles::template Load<6>(rows[begin] + e, stride);
    } else {
      std::memset(copy, 0, sizeof(copy));
      for (size_t i = 0; i < count; ++i) {
        std::memcpy(copy[i], rows[begin + i] + e, std::min(kBytes, depth - e));
      }
      Tiles::template Load<6>(copy, kBytes);
    }
    const int32_t* word = digits + e / 4 * kDigitColumns;
    const auto add = [&]<int k>() HWY_ATTR HEED_INLINE_LAMBDA {
      if constexpr (k < kTiles) {
        Tiles::template Load<7>(word + k * kTileWords, kDigitColumns * sizeof(int32_t));
        Tiles::template AddByteProducts<kFirst + k, 6, 7>();
      }
    };
    add.template operator()<0>();
    add.template operator()<1>();
    add.template operator()<2>();
  }
  constexpr ptrdiff_t kRow = kDigitColumns * sizeof(int32_t);
  Tiles::template Store<kFirst>(sums, kRow);
  if constexpr (kTiles > 1) Tiles::template Store<kFirst + 1>(sums + kTileWords, kRow);
  if constexpr (kTiles > 2) Tiles::template Store<kFirst + 2>(sums + 2 * kTileWords, kRow);
}

// out[j][r] = *factors[j] sum_e rows_j[e] x_r[e], with x as digits in TileLayout(). Writes all lanes of `out`.
template <class Tiles, class D, class V = hn::Vec<D>>
HWY_NOINLINE void AmxDotRows(D d, const StoredRows<int8_t>& rows, size_t depth, size_t num_rows,
                             const int32_t* HWY_RESTRICT digits, const float* const* HWY_RESTRICT factors,
                             float* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D()), kRows = kTileRows;
  const hn::RebindToSigned<D> di;
  const auto* tail = reinterpret_cast<const float*>(digits + TileLayout(depth, num_rows).Tail());
  const float* units = tail + kDigits * N;
  const V unit = hn::IfThenElseZero(hn::FirstN(d, num_rows), hn::LoadU(d, units));
  const V smaller = hn::LoadU(d, units + N);
  RowsInHand<int8_t> in_hand(rows, depth);
  alignas(64) int32_t sums[kMostRows * kDigitColumns];
  WithDigitTiles(num_rows, [&](auto tiles) HWY_ATTR {
    const auto add = [&]<int kFirst>(size_t begin) HWY_ATTR HEED_INLINE_LAMBDA {
      if (begin >= rows.count) return;
      DigitSums<Tiles, tiles.value, kFirst>(d, in_hand, begin, std::min(kRows, rows.count - begin), rows.cursor.stride,
                                            depth, digits, sums + begin * kDigitColumns);
    };
    for (size_t begin = 0; begin < rows.count; begin += 2 * kRows) {
      add.template operator()<0>(begin);
      add.template operator()<3>(begin + kRows);
    }
  });
  for (size_t j = 0; j < rows.count; ++j) {
    const int32_t* row = sums + j * kDigitColumns;
    const hn::Vec<decltype(di)> digit_rows[] = {hn::LoadU(di, row), hn::LoadU(di, row + num_rows),
                                                hn::LoadU(di, row + 2 * num_rows)};
    const V factor = hn::Mul(hn::Set(d, *factors[j]), smaller);
    hn::Store(OfDigits(d, digit_rows, unit, factor), d, out + j * N);
  }
}

// Transposes digits of weights to rows of tiles of 64 weights each, row after row.
template <class D>
HWY_INLINE void TransposeDigits(D d, const int32_t* HWY_RESTRICT digits, const DigitLayout& layout,
                                int32_t (*tiles)[kTileWords]) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToSigned<D> di;
  for (size_t k = 0; k < kDigits; ++k) {
    for (size_t word = 0; word < kTileWords; word += N) {
      hn::Vec<decltype(di)> v[N];
      HWY_UNROLL(16)
      for (size_t i = 0; i < N; ++i) {
        v[i] = hn::LoadU(di, digits + (word + i) * layout.word + k * layout.digit);
      }
      Transpose(di, v);
      HWY_UNROLL(16)
      for (size_t i = 0; i < N; ++i) hn::Store(v[i], di, tiles[k * layout.digit + i] + word);
    }
  }
}

// Interleaves columns [begin, begin + 64), as far as they exist, of 64 rows: four rows side by side are a row of a
// tile, which has 16 columns.
template <class D>
HWY_INLINE void InterleaveRows(D d, RowsInHand<int8_t>& rows, size_t count, size_t begin, size_t width,
                               uint32_t (*tiles)[kTileRows][kTileWords]) {
  constexpr size_t N = hn::MaxLanes(D()), kBytes = 4 * N;  // bytes of a vector
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<int8_t, D> bytes;
  const hn::Repartition<uint8_t, D> unsigned_bytes;
  const hn::Repartition<uint16_t, D> halves;
  // Interleaving stays within 128 bits; with this order of words, columns come out in order.
  alignas(64) uint32_t order[N];
  for (size_t i = 0; i < N; ++i) order[i] = static_cast<uint32_t>(i % 4 * (N / 4) + i / 4);
  const auto indices = hn::SetTableIndices(words, order);
  for (size_t word = 0; word < kTileRows; ++word) {
    for (size_t e = 0; e < 4 * kTileWords; e += kBytes) {
      hn::Vec<decltype(unsigned_bytes)> row[4];
      HWY_UNROLL(4)
      for (size_t i = 0; i < 4; ++i) {
        const size_t j = 4 * word + i;
        auto v = hn::Zero(bytes);
        if (j < count && e < width) {
          if (i != 3) rows.PrefetchLine();
          const int8_t* at = rows[j] + begin + e;
          v = width - e >= kBytes ? hn::LoadU(bytes, at) : hn::LoadN(bytes, at, width - e);
        }
        row[i] = hn::BitCast(unsigned_bytes, hn::TableLookupLanes(hn::BitCast(words, v), indices));
      }
      const auto low = [&](size_t i) HWY_ATTR {
        return hn::BitCast(halves, hn::InterleaveLower(unsigned_bytes, row[i], row[i + 1]));
      };
      const auto high = [&](size_t i) HWY_ATTR {
        return hn::BitCast(halves, hn::InterleaveUpper(unsigned_bytes, row[i], row[i + 1]));
      };
      const hn::Vec<decltype(halves)> word_vectors[] = {
          hn::InterleaveLower(halves, low(0), low(2)), hn::InterleaveUpper(halves, low(0), low(2)),
          hn::InterleaveLower(halves, high(0), high(2)), hn::InterleaveUpper(halves, high(0), high(2))};
      HWY_UNROLL(4)
      for (size_t i = 0; i < 4; ++i) {
        const size_t column = e + i * N;
        hn::Store(hn::BitCast(words, word_vectors[i]), words, tiles[column / kTileWords][word] + column % kTileWords);
      }
    }
  }
}

// out[r][e] = out[r][e] factor[r] + sum_j weights[j][r] rows_j[e] for at most 64 rows j; `clear` starts from zero. Rows
// r of `out` are whole vectors.
template <class Tiles, class D, class V = hn::Vec<D>>
HWY_NOINLINE void AmxSumRows(D d, const StoredRows<int8_t>& rows, size_t columns, const float* HWY_RESTRICT weights,
                             bool clear, const float* HWY_RESTRICT factor, size_t num_rows, float* HWY_RESTRICT out,
                             ptrdiff_t out_row) {
  constexpr size_t N = hn::MaxLanes(D()), kColumns = 4 * kTileWords;
  const hn::RebindToSigned<D> di;
  if (rows.count == 0) return;
  const DigitLayout layout = TileLayout(rows.count, num_rows);
  alignas(64) int32_t digits[kTileRows * kDigitColumns + DigitLayout::kTailVectors * N];
  alignas(64) int32_t weight_digits[kDigitColumns][kTileWords];
  alignas(64) uint32_t tiles[kColumns / kTileWords][kTileRows][kTileWords];
  alignas(64) int32_t sums[kColumns / kTileWords][kDigitColumns][kTileWords];
  KeepAwake<Tiles>();
  ToDigits(d, weights, rows.count, layout, digits);
  KeepAwake<Tiles>();
  TransposeDigits(d, digits, layout, weight_digits);
  const float* units = reinterpret_cast<const float*>(digits + layout.Tail()) + kDigits * N;
  RowsInHand<int8_t> in_hand(rows, columns);
  Tiles::template Load<5>(weight_digits[0], 64);
  Tiles::template Load<6>(weight_digits[kTileRows], 64);
  Tiles::template Load<7>(weight_digits[2 * kTileRows], 64);
  for (size_t begin = 0; begin < columns; begin += kColumns) {
    const size_t width = std::min(columns - begin, kColumns);
    InterleaveRows(d, in_hand, rows.count, begin, width, tiles);
    WithDigitTiles(num_rows, [&](auto digit_tiles) HWY_ATTR {
      for (size_t i = 0; i * kTileWords < width; ++i) {
        Tiles::template Load<4>(tiles[i], 64);
        const auto multiply = [&]<int k>() HWY_ATTR HEED_INLINE_LAMBDA {
          if constexpr (k < digit_tiles.value) {
            Tiles::template Zero<k>();
            Tiles::template AddByteProducts<k, 5 + k, 4>();
            Tiles::template Store<k>(sums[i][k * kTileRows], 64);
          }
        };
        multiply.template operator()<0>();
        multiply.template operator()<1>();
        multiply.template operator()<2>();
      }
    });
    for (size_t r = 0; r < num_rows; ++r) {
      const V unit = hn::Set(d, units[r]), smaller = hn::Set(d, units[N + r]);
      const V scale = hn::Set(d, factor[r]);
      float* to = out + static_cast<ptrdiff_t>(r) * out_row + begin;
      for (size_t e = 0; e < width; e += N) {
        const auto& tile = sums[e / kTileWords];
        const hn::Vec<decltype(di)> digit_rows[] = {hn::Load(di, tile[r] + e % kTileWords),
                                                    hn::Load(di, tile[num_rows + r] + e % kTileWords),
                                                    hn::Load(di, tile[2 * num_rows + r] + e % kTileWords)};
        const V sum = OfDigits(d, digit_rows, unit, smaller);
        hn::Store(clear ? sum : hn::MulAdd(hn::Load(d, to + e), scale, sum), d, to + e);
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_BYTE_PRODUCTS_INL_H_
