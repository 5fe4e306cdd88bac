// Dot products of a few f32 rows with many of bytes, in integers: for CPUs that multiply
// four bytes by four others and add them up in one instruction.
//
// Compiled for such targets alone, and for rows of up to 2^16 elements, whose sums fit into
// 32 bits. A row x of the few becomes fixed point, x = unit q with |q| < 2^23, and q three
// digits of base 256, from -128 to 127 each. Sums of products of digits and bytes are
// exact: what is lost is at most about a unit per element, 2^-23 of the row's largest.
#if defined(HEED_SIMD_BYTE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_BYTE_TILE_INL_H_
#undef HEED_SIMD_BYTE_TILE_INL_H_
#else
#define HEED_SIMD_BYTE_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/simd/row_tile-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kDigits = 3;  // the highest first

// Words of four digits that rows of `depth` have, and the 32-bit elements of one lane: the
// words, where sums begin, the unit.
constexpr size_t DigitWords(size_t depth) { return (depth + 3) / 4; }
constexpr size_t DigitRows(size_t depth) { return kDigits * (DigitWords(depth) + 1) + 1; }

// Rows in lanes, x[e][lane] of `depth` elements, to digits[word][digit][lane] and what
// follows them. An infinite element leaves nothing but infinities of a row, a NaN only
// NaNs.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void ToDigits(D d, const float* HWY_RESTRICT x, size_t depth,
                         int32_t* HWY_RESTRICT digits) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr float kMost = 127 * 65536 + 127 * 256 + 127;
  const hn::RebindToSigned<D> di;
  using VI = hn::Vec<decltype(di)>;
  const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  V most = hn::Set(d, 0x1p-100f);  // of smaller rows, quotients would overflow
  V nan = hn::Zero(d);
  for (size_t e = 0; e < depth; ++e) {
    const V v = hn::Load(d, x + e * N);
    most = hn::Max(most, hn::IfThenZeroElse(hn::IsNaN(v), hn::Abs(v)));
    nan = hn::IfThenElse(hn::IsNaN(v), v, nan);
  }
  const auto infinite = hn::Eq(most, infinity);
  const V per_unit = hn::Div(hn::Set(d, kMost), most);
  VI sum[kDigits] = {hn::Zero(di), hn::Zero(di), hn::Zero(di)};
  for (size_t word = 0; word < DigitWords(depth); ++word) {
    VI packed[kDigits] = {hn::Zero(di), hn::Zero(di), hn::Zero(di)};
    for (size_t i = std::min<size_t>(4, depth - 4 * word); i-- > 0;) {
      const V v = hn::Load(d, x + (4 * word + i) * N);
      const V whole = hn::CopySign(hn::Set(d, kMost), v);
      const V scaled = hn::IfThenElse(
          infinite, hn::IfThenElseZero(hn::IsInf(v), whole), hn::Mul(v, per_unit));
      // Rounding the quotient up may go one beyond.
      VI rest = hn::NearestInt(hn::Clamp(scaled, hn::Set(d, -kMost), hn::Set(d, kMost)));
      HWY_UNROLL(3)
      for (int k = kDigits; k-- > 0;) {
        const VI digit = hn::ShiftRight<24>(hn::ShiftLeft<24>(rest));
        rest = hn::ShiftRight<8>(hn::Sub(rest, digit));
        sum[k] = hn::Add(sum[k], digit);
        packed[k] = hn::Or(hn::ShiftLeft<8>(packed[k]), hn::And(digit, hn::Set(di, 0xFF)));
      }
    }
    for (int k = 0; k < kDigits; ++k, digits += N) hn::Store(packed[k], di, digits);
  }
  // Bytes enter as b + 128, which products take as unsigned.
  for (int k = 0; k < kDigits; ++k, digits += N) {
    hn::Store(hn::Neg(hn::ShiftLeft<7>(sum[k])), di, digits);
  }
  const V unit = hn::Div(most, hn::Set(d, kMost));
  hn::Store(hn::BitCast(di, hn::IfThenElse(hn::IsNaN(nan), nan, unit)), di, digits);
}

// out[j][r] = factors[j] sum_e rows_j[e] x_r[e] of B N rows from `begin` on, or of those
// that there are.
template <int R, int B, bool kWhole, class D>
HWY_INLINE void DotByteTile(D d, RowsInHand<int8_t>& rows, size_t begin, size_t count,
                            size_t depth, const int32_t* HWY_RESTRICT digits,
                            const float* const* HWY_RESTRICT factors,
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
  const auto row = [&](size_t i) HWY_ATTR {
    return rows[begin + (kWhole ? i : std::min(i, count - 1))];
  };
  const int32_t* HWY_RESTRICT starts = digits + DigitWords(depth) * kDigits * N;
  VI sum[B][R][kDigits];
  HWY_UNROLL(4)
  for (int b = 0; b < B; ++b) {
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      HWY_UNROLL(3)
      for (int k = 0; k < kDigits; ++k) {
        sum[b][r][k] = hn::Set(di, starts[static_cast<size_t>(k) * N + static_cast<size_t>(r)]);
      }
    }
  }
  const auto sign = hn::Set(bytes, uint8_t{0x80});
  for (size_t e = 0; e < depth; e += kBytes) {
    const size_t rest = std::min(kBytes, depth - e);
    HWY_UNROLL(4)
    for (int b = 0; b < B; ++b) {
      rows.AskForVectors(d);
      V v[N];
      HWY_UNROLL(32)
      for (size_t i = 0; i < N; ++i) {
        const int8_t* at = row(static_cast<size_t>(b) * N + i) + e;
        const auto stored =
            rest == kBytes ? hn::LoadU(signed_bytes, at) : hn::LoadN(signed_bytes, at, rest);
        v[i] = hn::BitCast(d, hn::Xor(hn::BitCast(bytes, stored), sign));
      }
      Transpose(d, v);
      const int32_t* HWY_RESTRICT word = digits + e / 4 * kDigits * N;
      HWY_UNROLL(32)
      for (size_t i = 0; i < N; ++i) {
        if (4 * i >= rest) break;
        HWY_UNROLL(8)
        for (int r = 0; r < R; ++r) {
          HWY_UNROLL(3)
          for (int k = 0; k < kDigits; ++k) {
            const size_t at = (i * kDigits + static_cast<size_t>(k)) * N;
            sum[b][r][k] = hn::SumOfMulQuadAccumulate(
                di, hn::BitCast(bytes, v[i]),
                hn::BitCast(signed_bytes, hn::Set(di, word[at + static_cast<size_t>(r)])),
                sum[b][r][k]);
          }
        }
      }
    }
  }
  const auto* HWY_RESTRICT units = reinterpret_cast<const float*>(starts + kDigits * N);
  HWY_UNROLL(4)
  for (int b = 0; b < B; ++b) {
    const size_t first = static_cast<size_t>(b) * N;
    HWY_ALIGN float of_rows[N] = {};
    for (size_t i = 0; i < N && first + i < count; ++i) of_rows[i] = *factors[begin + first + i];
    const V factor = hn::Load(d, of_rows);
    V by_row[R];
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      V x = hn::ConvertTo(d, sum[b][r][0]);
      HWY_UNROLL(2)
      for (int k = 1; k < kDigits; ++k) {
        x = hn::MulAdd(x, hn::Set(d, 256.0f), hn::ConvertTo(d, sum[b][r][k]));
      }
      by_row[r] = hn::Mul(hn::Mul(x, hn::Set(d, units[r])), factor);
    }
    StoreColumns<R>(d, by_row, kWhole ? N : count - first, out + (begin + first) * N);
  }
}

// The same for all rows: x as ToDigits() left it, rows_j times *factors[j].
template <int R, class D>
HWY_NOINLINE void DotByteRows(D d, const StoredRows<int8_t>& rows, size_t depth,
                              const int32_t* HWY_RESTRICT digits,
                              const float* const* HWY_RESTRICT factors,
                              float* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int B = R <= 2 ? 2 : 1;
  RowsInHand<int8_t> in_hand(rows, depth);
  size_t begin = 0;
  for (; begin + B * N <= rows.count; begin += B * N) {
    DotByteTile<R, B, true>(d, in_hand, begin, B * N, depth, digits, factors, out);
  }
  for (; begin < rows.count; begin += N) {
    DotByteTile<R, 1, false>(d, in_hand, begin, std::min(N, rows.count - begin), depth, digits,
                             factors, out);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_BYTE_TILE_INL_H_
