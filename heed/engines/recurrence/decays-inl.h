// Exponentials of log decays, which are at most 0.
//
// Compiled once per SIMD target. Without an instruction that scales by a power of two, most of Exp() handles results
// that over- or underflow: it clamps exponents and applies them in steps. A decay does not overflow, and one below the
// smallest normal number is rounded to 0, so its exponent is added as an integer: 13 instructions instead of 28 on
// AVX2, and 18 instead of 58 for exp(x) and exp(x) - 1 together. Adding 1.5 2^23 rounds to an integer, which is then in
// the lowest bits.
#if defined(HEED_ENGINES_RECURRENCE_DECAYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_DECAYS_INL_H_
#undef HEED_ENGINES_RECURRENCE_DECAYS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_DECAYS_INL_H_
#endif

#include <cstddef>
#include <type_traits>

#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class T>
inline constexpr bool kAddsExponents = HWY_NATIVE_FMA && !HEED_HAVE_SCALEF && std::is_same_v<T, float>;

// A log decay x = (n + r) ln 2 with integral n, which is in the low bits of `shifted`, and |r| <= 1/2.
template <class D, class V = hn::Vec<D>>
struct SplitDecay {
  V r;
  hn::VFromD<hn::RebindToSigned<D>> exponent;  // n, shifted to the position of exponents
  hn::Mask<D> vanishes;                        // true if e^x is below the smallest normal number

  HWY_INLINE SplitDecay(D d, V x) {
    constexpr float kHigh = 1.44269502162933349609375f, kLow = 1.925963033500e-8f, kRound = 12582912.0f;
    const hn::RebindToSigned<D> di;
    const V high = hn::Set(d, kHigh), round = hn::Set(d, kRound);
    const V shifted = hn::MulAdd(x, high, round), n = hn::Sub(shifted, round);
    r = hn::MulAdd(x, hn::Set(d, kLow), hn::MulSub(x, high, n));
    exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
    vanishes = hn::Lt(x, hn::Set(d, -87.3365447f));
  }
};

// Returns e^x for x <= 0 or NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpOfDecay(D d, V x) {
  if constexpr (kAddsExponents<hn::TFromD<D>>) {
    const hn::RebindToSigned<D> di;
    const SplitDecay<D> split(d, x);
    const V fraction = hs::Exp2Fraction(d, split.r);
    const V y = hn::BitCast(d, hn::Add(hn::BitCast(di, fraction), split.exponent));
    return hn::IfThenZeroElse(split.vanishes, y);
  } else {
    return hs::Exp(d, x);
  }
}

// e^x and e^x - 1 for x <= 0 or NaN.
template <class V>
struct DecayAndLessOne {
  V decay, less_one;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE DecayAndLessOne<V> ExpsOfDecay(D d, V x) {
  if constexpr (kAddsExponents<hn::TFromD<D>>) {
    const hn::RebindToSigned<D> di;
    const SplitDecay<D> split(d, x);
    const V tail = hs::Exp2LessOneTail(d, split.r), one = hn::Set(d, 1.0f);
    const V power = hn::BitCast(d, hn::Add(hn::BitCast(di, one), split.exponent)), rest = hn::Mul(power, split.r);
    return {hn::IfThenZeroElse(split.vanishes, hn::MulAdd(rest, tail, power)),
            hn::IfThenElse(split.vanishes, hn::Set(d, -1.0f), hn::MulAdd(rest, tail, hn::Sub(power, one)))};
  } else {
    return {hs::Exp(d, x), hs::Expm1(d, x)};
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_DECAYS_INL_H_
