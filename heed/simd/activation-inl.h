// Sigmoid, silu and softplus on vectors, f32 and f64, over the whole range.
//
// Compiled once per SIMD target. No exponential has a positive argument, and no difference cancels. NaN stays NaN.
#if defined(HEED_SIMD_ACTIVATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_ACTIVATION_INL_H_
#undef HEED_SIMD_ACTIVATION_INL_H_
#else
#define HEED_SIMD_ACTIVATION_INL_H_
#endif

#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// s = 1 / (1 + exp(-x)), and 1 - s.
template <class V>
struct SigmoidPair {
  V s, complement;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE SigmoidPair<V> Sigmoids(D d, V x) {
  const V one = hn::Set(d, hn::TFromD<D>{1});
  const V e = ExpNonPositive(d, hn::Neg(hn::Abs(x)));
  const V large = FastDivide(d, one, hn::Add(one, e));
  const V small = hn::Mul(e, large);
  const auto negative = hn::Lt(x, hn::Zero(d));
  return {hn::IfThenElse(negative, small, large), hn::IfThenElse(negative, large, small)};
}

// x s.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Silu(D d, V x) {
  return hn::Mul(x, Sigmoids(d, x).s);
}

// The derivative of silu, s + x s (1 - s).
template <class V>
HWY_INLINE V SiluSlope(V x, const SigmoidPair<V>& sigmoids) {
  return hn::MulAdd(hn::Mul(x, sigmoids.s), sigmoids.complement, sigmoids.s);
}

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 atanh(s), s = y / (2 + y) <= 1/3, by its
// series: the first omitted term is below 2^-27 (2^-60) of the sum.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Softplus(D d, V x) {
  using T = hn::TFromD<D>;
  constexpr int kTerms = sizeof(T) == 4 ? 8 : 18;
  const V y = ExpNonPositive(d, hn::Neg(hn::Abs(x)));
  const V s = FastDivide(d, y, hn::Add(hn::Set(d, T{2}), y)), square = hn::Mul(s, s);
  V sum = hn::Set(d, static_cast<T>(1.0 / (2 * kTerms - 1)));
  HWY_UNROLL(18)
  for (int k = kTerms - 1; k > 0; --k) {
    sum = hn::MulAdd(sum, square, hn::Set(d, static_cast<T>(1.0 / (2 * k - 1))));
  }
  const V positive = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);
  return hn::MulAdd(hn::Add(s, s), sum, positive);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_ACTIVATION_INL_H_
