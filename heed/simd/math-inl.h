// exp2, exp and tanh on vectors of f32 and f64, for all arguments.
//
// Compiled once per SIMD target. The polynomials are near-minimax. The errors were measured against long double over
// all exponents (simd/math_test.cc):
//
//            f32        f64
//   Exp2     3 ulp      2 ulp     and exactly 1 at 0
//   Exp      3 ulp      2 ulp
//   Exp2NonPositive and ExpNonPositive as Exp2 and Exp
//   Tanh     4 ulp      5 ulp
//   Expm1    4 ulp      5 ulp     for x <= 0
//
// Special values are those of libm: NaN stays NaN, exp2(-inf) = +0, exp2(inf) = inf, tanh(+-inf) = +-1. The exception
// is tanh(-0) = +0. Subnormal results may be flushed to zero. Highway's own Exp takes two to three times as long, which
// would slow down softmax noticeably.
#if defined(HEED_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_MATH_INL_H_
#undef HEED_SIMD_MATH_INL_H_
#else
#define HEED_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway's vectors have 512 bits from AVX3 on, so AVX-512F intrinsics can be used there directly. scalef does in one
// instruction what takes a clamp, a shift and one or two multiplications elsewhere.
#define HEED_HAVE_SCALEF (HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86)

inline constexpr double kLog2E = 1.44269504088896340736;
inline constexpr double kLn2 = 0.693147180559945309417;

// Returns x * 2^n for an integral n with |n| <= 2^15 (with scalef, 2^floor(n) for any n), correct through over- and
// underflow.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ScaleByPowerOfTwo(D d, V x, V n) {
  (void)d;  // scalef has the type in its name
#if HEED_HAVE_SCALEF
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return V{_mm512_scalef_ps(x.raw, n.raw)};
  } else {
    return V{_mm512_scalef_pd(x.raw, n.raw)};
  }
#else
  using T = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  constexpr int kBias = sizeof(T) == 4 ? 127 : 1023;
  using TI = hn::TFromD<decltype(di)>;
  // With three factors each exponent is in range, and only the last product can round.
  const auto e = hn::ConvertTo(di, n);
  const auto third = hn::ShiftRight<2>(e);
  const auto rest = hn::Sub(e, hn::Add(third, third));
  const auto bias = hn::Set(di, static_cast<TI>(kBias));
  const auto f = hn::BitCast(d, hn::ShiftLeft<kMantissa>(hn::Add(third, bias)));
  const auto g = hn::BitCast(d, hn::ShiftLeft<kMantissa>(hn::Add(hn::ShiftRight<1>(rest), bias)));
  const auto h = hn::BitCast(d, hn::ShiftLeft<kMantissa>(hn::Add(hn::Sub(rest, hn::ShiftRight<1>(rest)), bias)));
  return hn::Mul(hn::Mul(hn::Mul(hn::Mul(x, f), f), g), h);
#endif
}

// Returns (e^y - 1) / y in f64 for |y| <= ln(2) / 2 by a Taylor polynomial; the first omitted term is 3e-19.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpSeries(D d, V y) {
  constexpr double kInverseFactorials[] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
      1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0};
  V p = hn::Set(d, 1.0 / 87178291200);
  HWY_UNROLL(16)
  for (const double coefficient : kInverseFactorials) {
    p = hn::MulAdd(p, y, hn::Set(d, coefficient));
  }
  return p;
}

// Returns 2^r for |r| <= 1/2.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2Fraction(D d, V r) {
  using T = hn::TFromD<D>;
  const auto c = [d](double x) HWY_ATTR { return hn::Set(d, static_cast<T>(x)); };
  if constexpr (sizeof(T) == 4) {
    // A minimax polynomial of degree 5 with p(0) = 1 and error 9.1e-8: a row whose maximum is unchanged must be
    // rescaled by exactly 1. (A free p(0) gives 7.5e-8, but 2.6 ulp after rounding.)
    V p = hn::MulAdd(c(0.001326472714), r, c(0.00967151264));
    p = hn::MulAdd(p, r, c(0.05550733743));
    p = hn::MulAdd(p, r, c(0.2402224209));
    p = hn::MulAdd(p, r, c(0.6931469776));
    return hn::MulAdd(p, r, c(1));
  } else {
    const V y = hn::Mul(r, c(kLn2));
    return hn::MulAdd(ExpSeries(d, y), y, c(1));
  }
}

// Returns the smaller of x and `limit`, or NaN if x is NaN: where an operand is NaN, x86 returns the second.
template <class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE V AtMost(D d, V x, T limit) {
#if HWY_ARCH_X86
  return hn::Min(hn::Set(d, limit), x);
#else
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, limit)), hn::Set(d, limit), x);
#endif
}

// Returns the larger of x and `limit`, or NaN if x is NaN.
template <class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE V AtLeast(D d, V x, T limit) {
#if HWY_ARCH_X86
  return hn::Max(hn::Set(d, limit), x);
#else
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, limit)), hn::Set(d, limit), x);
#endif
}

// Clamps x to [-limit, limit]; NaN stays NaN.
template <class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE V WithinLimit(D d, V x, T limit) {
  return AtMost(d, AtLeast(d, x, -limit), limit);
}

// Clamps to exponents that are certain to over- or underflow.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ClampExponent(D d, V x) {
  using T = hn::TFromD<D>;
  return WithinLimit(d, x, sizeof(T) == 4 ? T{160} : T{1100});
}

// Returns 2^x.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D d, V x) {
#if !HEED_HAVE_SCALEF
  x = ClampExponent(d, x);
#endif
  // With scalef no clamp is needed: an x beyond the precision is its own nearest integer with fraction 0, and
  // scalef(NaN, -inf) = +0, scalef(NaN, inf) = inf.
  const V n = hn::Round(x);
  return ScaleByPowerOfTwo(d, Exp2Fraction(d, hn::Sub(x, n)), n);
}

#if !HEED_HAVE_SCALEF
template <class V>
struct RoundedPower {
  V n, power;  // 2^n
};

// The largest magnitude of n below: 2^n is 0 at minus that.
template <class T>
inline constexpr T kPowerLimit = sizeof(T) == 4 ? T{127} : T{1023};

// t, of at most kPowerLimit, rounded to n. The sum of t and a number whose last bit counts ones has n, biased, in its
// lowest bits, which a shift makes 2^n.
template <class D, class V = hn::Vec<D>>
HWY_INLINE RoundedPower<V> RoundedPowerOf(D d, V t) {
  using T = hn::TFromD<D>;
  const hn::RebindToSigned<D> di;
  constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
  constexpr T kCountsOnes = sizeof(T) == 4 ? T{12582912} : T{6755399441055744};  // 1.5 times 2^23, 2^52
  const V magic = hn::Set(d, kCountsOnes + kPowerLimit<T>);                      // the limit is the exponent's bias
  const V biased = hn::Add(t, magic);
  return {hn::Sub(biased, magic), hn::BitCast(d, hn::ShiftLeft<kMantissa>(hn::BitCast(di, biased)))};
}
#endif  // !HEED_HAVE_SCALEF

// 2^x for x <= 0, as of softmax and decays; arguments up to 127 are computed too (a difference of equals may round to
// more than 0). It is exactly 1 at 0, and NaN stays NaN. Without scalef it takes 11 instructions in f32, less than half
// of Exp2's, because results are exactly 0 where x rounds to less than -126 (-1022 in f64): no second factor is needed
// for subnormal numbers.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2NonPositive(D d, V x) {
#if HEED_HAVE_SCALEF
  return heed::HWY_NAMESPACE::Exp2(d, x);  // Highway has one too
#else
  x = AtLeast(d, x, -kPowerLimit<hn::TFromD<D>>);
  const RoundedPower<V> rounded = RoundedPowerOf(d, x);
  return hn::Mul(Exp2Fraction(d, hn::Sub(x, rounded.n)), rounded.power);
#endif
}

// log2(e) in two parts, so that the products of large arguments lose nothing.
template <class T>
inline constexpr T kLog2EHigh = static_cast<T>(sizeof(T) == 4 ? 1.44269502162933349609375 : 1.442695040888963387);
template <class T>
inline constexpr T kLog2ELow = static_cast<T>(sizeof(T) == 4 ? 1.925963033500e-8 : 2.0355273740931e-17);

// x log2(e) - n, where n is the first part's product, rounded.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpFraction(D d, V x, V n) {
  using T = hn::TFromD<D>;
  const V high = hn::Set(d, kLog2EHigh<T>), low = hn::Set(d, kLog2ELow<T>);
#if HWY_NATIVE_FMA
  return hn::MulAdd(x, low, hn::MulSub(x, high, n));
#else
  // Without a fused product: Cody and Waite's ln 2 in two parts, then scaled.
  constexpr double kLn2High = sizeof(T) == 4 ? 0.693359375 : 0.693147180369123816490;
  constexpr double kLn2Low = sizeof(T) == 4 ? -2.12194440e-4 : 1.90821492927058770002e-10;
  const V y = hn::Sub(hn::Sub(x, hn::Mul(n, hn::Set(d, static_cast<T>(kLn2High)))),
                      hn::Mul(n, hn::Set(d, static_cast<T>(kLn2Low))));
  return hn::MulAdd(y, low, hn::Mul(y, high));
#endif
}

// e^x.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V x) {
  using T = hn::TFromD<D>;
  x = WithinLimit(d, x, sizeof(T) == 4 ? T{120} : T{800});
  const V n = hn::Round(hn::Mul(x, hn::Set(d, kLog2EHigh<T>)));
  return ScaleByPowerOfTwo(d, Exp2Fraction(d, ExpFraction(d, x, n)), n);
}

// e^x for x <= 0, with the bits of Exp where the result is a normal number, below exactly 0 without scalef: the limit
// is where n becomes -127 (-1023 in f64).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpNonPositive(D d, V x) {
#if HEED_HAVE_SCALEF
  return heed::HWY_NAMESPACE::Exp(d, x);
#else
  using T = hn::TFromD<D>;
  x = AtLeast(d, x, sizeof(T) == 4 ? T{-88} : T(-709.3));
  const RoundedPower<V> rounded = RoundedPowerOf(d, hn::Mul(x, hn::Set(d, kLog2EHigh<T>)));
  return hn::Mul(Exp2Fraction(d, ExpFraction(d, x, rounded.n)), rounded.power);
#endif
}

// a / b for positive normal b, to 1 ulp or so.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V FastDivide(D d, V a, V b) {
#if HEED_HAVE_SCALEF
  if constexpr (sizeof(hn::TFromD<D>) == 4) {  // 14 bits, then one Newton step
    const V y = hn::ApproximateReciprocal(b);
    const V q = hn::Mul(a, y);
    return hn::MulAdd(hn::NegMulAdd(b, q, a), y, q);
  }
#endif
  (void)d;
  return hn::Div(a, b);
}

// (2^r - 1) / r for |r| <= 1/2.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2LessOneTail(D d, V r) {
  using T = hn::TFromD<D>;
  const auto c = [d](double v) HWY_ATTR { return hn::Set(d, static_cast<T>(v)); };
  if constexpr (sizeof(T) == 4) {  // minimax, 1.1e-8
    V tail = hn::MulAdd(c(1.54035124e-4), r, c(1.33907355e-3));
    tail = hn::MulAdd(tail, r, c(9.61823749e-3));
    tail = hn::MulAdd(tail, r, c(5.55035743e-2));
    tail = hn::MulAdd(tail, r, c(0.240226498));
    return hn::MulAdd(tail, r, c(0.693147188));
  } else {
    return hn::Mul(ExpSeries(d, hn::Mul(r, c(kLn2))), c(kLn2));
  }
}

// 2^t - 1 for |t| <= 100 as 2^n (2^r - 1) + (2^n - 1), whose terms never cancel: no
// second branch for small arguments.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2Minus1(D d, V t) {
  using T = hn::TFromD<D>;
  const auto c = [d](double v) HWY_ATTR { return hn::Set(d, static_cast<T>(v)); };
  const V n = hn::Round(t);
  const V r = hn::Sub(t, n);
  const V tail = Exp2LessOneTail(d, r);
  const V power = ScaleByPowerOfTwo(d, c(1), n);
  return hn::MulAdd(hn::Mul(power, r), tail, hn::Sub(power, c(1)));
}

// e^x - 1 for x <= 0.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Expm1(D d, V x) {
  using T = hn::TFromD<D>;
  constexpr T kLimit = sizeof(T) == 4 ? T{-30} : T{-60};  // -1 to the last bit
  const V limit = hn::Set(d, kLimit);
  x = hn::IfThenElse(hn::Lt(x, limit), limit, x);
  return Exp2Minus1(d, hn::Mul(x, hn::Set(d, static_cast<T>(kLog2E))));
}

// tanh(x), given t = x 2 log2(e): u / (u + 2) with u = e^2x - 1.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V TanhScaled(D d, V t) {
  using T = hn::TFromD<D>;
  const auto c = [d](double v) HWY_ATTR { return hn::Set(d, static_cast<T>(v)); };
  constexpr double kLimit = sizeof(T) == 4 ? 30 : 60;  // tanh rounds to 1 there
#if HWY_TARGET <= HWY_SSE2                             // x86: where an operand is NaN, the second is returned
  t = hn::Min(c(kLimit), hn::Max(c(-kLimit), t));
#else
  t = hn::IfThenElse(hn::IsNaN(t), t, hn::Min(c(kLimit), hn::Max(c(-kLimit), t)));
#endif
  const V u = Exp2Minus1(d, t);
  return FastDivide(d, u, hn::Add(u, c(2)));
}

// tanh(x).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  return TanhScaled(d, hn::Mul(x, hn::Set(d, static_cast<hn::TFromD<D>>(2 * kLog2E))));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_MATH_INL_H_
