// f32 rows in fixed point, so that their products with int8 rows are integer sums.
//
// Compiled once per SIMD target with int8 dot products. A row x becomes x = unit q with |q| < 2^23, where q has three
// digits of base 256, from -128 to 127 each. Sums of products of digits and bytes are exact in 32 bits for rows of up
// to 2^16 elements, in any order: the error is at most about a unit per element, 2^-23 of the row's largest. For rows
// of small magnitude the unit is given as two factors, neither of which is subnormal.
#if defined(HEED_SIMD_DIGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_DIGITS_INL_H_
#undef HEED_SIMD_DIGITS_INL_H_
#else
#define HEED_SIMD_DIGITS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kDigits = 3;  // most significant first

// The layout of ToDigits() for the digits of rows in lanes, in 32-bit elements: words of four digits, with strides
// `digit` between the digits of a word and `word` between words. After the words come vectors of one number per lane:
// the initial value of sums, and two factors of the unit.
struct DigitLayout {
  size_t words, digit, word;

  constexpr size_t Tail() const { return words * word; }
  static constexpr size_t kTailVectors = kDigits + 2;
};
constexpr size_t DigitWords(size_t depth) { return (depth + 3) / 4; }

// Converts x[e][lane] of `depth` elements. Words without elements are zero. A row with an infinite element gives only
// infinities, a row with a NaN only NaNs.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void ToDigits(D d, const float* HWY_RESTRICT x, size_t depth, const DigitLayout& layout,
                         int32_t* HWY_RESTRICT digits) {
  constexpr size_t N = hn::MaxLanes(D());
  // One less than the number with three maximal digits, since rounding the quotient may add one.
  constexpr int32_t kMost = 0x7F7F7E, kOffset = 0x808080;
  constexpr auto kLargest = static_cast<float>(kMost);
  const hn::RebindToSigned<D> di;
  const hn::Repartition<int8_t, D> bytes;
  const hn::Repartition<uint8_t, D> unsigned_bytes;
  using VI = hn::Vec<decltype(di)>;
  V most = hn::Set(d, std::numeric_limits<float>::min()), marks = hn::Zero(d);
  for (size_t e = 0; e < depth; ++e) {
    const V v = hn::Load(d, x + e * N);
    most = hn::Max(hn::Abs(v), most);
    marks = hn::MulAdd(v, hn::Zero(d), marks);
  }
  // Rare: in an infinite row only infinities count, each as the largest number.
  const bool special = !hn::AllFalse(d, hn::IsNaN(marks));
  V nan = hn::Zero(d);
  auto infinite = hn::Lt(most, hn::Zero(d));
  if (HWY_UNLIKELY(special)) {
    for (size_t e = 0; e < depth; ++e) {
      const V v = hn::Load(d, x + e * N);
      nan = hn::IfThenElse(hn::IsNaN(v), v, nan);
      infinite = hn::Or(infinite, hn::IsInf(v));
    }
    most = hn::IfThenElse(infinite, hn::Set(d, std::numeric_limits<float>::infinity()), most);
  }
  const auto small = hn::Lt(most, hn::Set(d, 0x1p-64f));
  const V larger = hn::IfThenElse(small, hn::Set(d, 0x1p64f), hn::Set(d, 1.0f));
  most = hn::Mul(most, larger);
  const V per_unit = hn::Div(hn::Set(d, kLargest), most);
  const VI offset = hn::Set(di, kOffset);

  // The digits of an element, one per byte; with an offset they are its digits in base 256.
  const auto element_at = [&](size_t e) HWY_ATTR {
    if (e >= depth) return hn::Zero(di);
    const V v = hn::Load(d, x + e * N);
    V quotient = hn::Mul(hn::Mul(v, larger), per_unit);
    if (HWY_UNLIKELY(special)) {
      const V whole = hn::CopySign(hn::Set(d, kLargest), v);
      quotient = hn::IfThenElse(infinite, hn::IfThenElseZero(hn::IsInf(v), whole), quotient);
    }
    return hn::Xor(hn::Add(hn::NearestInt(quotient), offset), offset);
  };
  const VI even = hn::Set(di, 0x00FF00FF), lower = hn::Set(di, 0xFFFF);
  const auto put = [&](VI digit_sum, size_t word, size_t k)
                       HWY_ATTR { hn::StoreU(digit_sum, di, digits + word * layout.word + k * layout.digit); };
  VI sum[kDigits] = {hn::Zero(di), hn::Zero(di), hn::Zero(di)};
  for (size_t word = 0; word < layout.words; ++word) {
    VI low[2], high[2];  // bytes 0 and 2, and bytes 1 and 3, of two elements
    HWY_UNROLL(2)
    for (size_t i = 0; i < 2; ++i) {
      const VI first = element_at(4 * word + 2 * i), second = element_at(4 * word + 2 * i + 1);
      low[i] = hn::Or(hn::And(first, even), hn::ShiftLeft<8>(hn::And(second, even)));
      high[i] = hn::Or(hn::And(hn::ShiftRight<8>(first), even), hn::AndNot(even, second));
    }
    const VI packed[kDigits] = {hn::Or(hn::And(hn::ShiftRight<16>(low[0]), lower), hn::AndNot(lower, low[1])),
                                hn::Or(hn::And(high[0], lower), hn::ShiftLeft<16>(high[1])),
                                hn::Or(hn::And(low[0], lower), hn::ShiftLeft<16>(low[1]))};
    HWY_UNROLL(3)
    for (size_t k = 0; k < kDigits; ++k) {
      put(packed[k], word, k);
      sum[k] =
          hn::SumOfMulQuadAccumulate(di, hn::Set(unsigned_bytes, uint8_t{1}), hn::BitCast(bytes, packed[k]), sum[k]);
    }
  }
  // For bytes stored as b + 128, which some dot products take as unsigned.
  int32_t* tail = digits + layout.Tail();
  for (const VI digit_sum : sum) {
    hn::StoreU(hn::Neg(hn::ShiftLeft<7>(digit_sum)), di, tail);
    tail += N;
  }
  const V unit = hn::Div(most, hn::Set(d, kLargest));
  const V smaller = hn::IfThenElse(small, hn::Set(d, 0x1p-64f), hn::Set(d, 1.0f));
  hn::StoreU(hn::BitCast(di, hn::IfThenElse(hn::IsNaN(nan), nan, unit)), di, tail);
  hn::StoreU(hn::BitCast(di, smaller), di, tail + N);
}

// The number with these sums of digits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V OfDigits(D d, const hn::Vec<hn::RebindToSigned<D>>* HWY_RESTRICT sums, V unit, V factor) {
  V x = hn::ConvertTo(d, sums[0]);
  HWY_UNROLL(2)
  for (int k = 1; k < kDigits; ++k) {
    x = hn::MulAdd(x, hn::Set(d, 256.0f), hn::ConvertTo(d, sums[k]));
  }
  return hn::Mul(hn::Mul(x, unit), factor);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_DIGITS_INL_H_
