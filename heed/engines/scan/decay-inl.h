// Decays: factors 2^t that are applied without being rounded themselves.
//
// Compiled once per SIMD target. With t = n + r, |r| <= 1/2, and f = 2^r - 1,
//
//   2^t h = 2^n (h + f h)
//
// is h to within one rounding of it, however near to 1 or to 0 the factor is. Rounded once, a factor of
// .999 would take a state off by a thousand roundings; h + (2^t - 1) h would keep roundings of what
// a strong decay has forgotten.
#if defined(HEED_ENGINES_SCAN_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_DECAY_INL_H_
#undef HEED_ENGINES_SCAN_DECAY_INL_H_
#else
#define HEED_ENGINES_SCAN_DECAY_INL_H_
#endif

#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class V>
struct Decay {
  V fraction, exponent;  // f and n
};

// A logarithm to base 2 below which everything is forgotten, and which times 0 is 0.
template <class D>
HWY_INLINE hn::Vec<D> AtLeastForgotten(D d, hn::Vec<D> t) {
  return hn::Max(hn::Set(d, hn::TFromD<D>{-1e15}), t);  // of t and NaN, x86 takes the second
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE Decay<V> DecayOf(D d, V t) {
  using T = hn::TFromD<D>;
  const auto c = [d](double v) HWY_ATTR { return hn::Set(d, static_cast<T>(v)); };
#if HEED_HAVE_SCALEF
  constexpr int kFromNearest = 8;  // no exceptions, to integers
  V r;
  if constexpr (sizeof(T) == 4) {
    r = V{_mm512_reduce_ps(t.raw, kFromNearest)};
  } else {
    r = V{_mm512_reduce_pd(t.raw, kFromNearest)};
  }
  const V n = hn::Sub(t, r);
#else
  t = hn::Max(c(sizeof(T) == 4 ? -300 : -2200), t);  // 0, whatever it multiplies
  const V n = hn::Round(t), r = hn::Sub(t, n);
#endif
  if constexpr (sizeof(T) == 4) {  // minimax of (2^r - 1) / r, 1.1e-8
    V p = hn::MulAdd(c(1.54035124e-4), r, c(1.33907355e-3));
    p = hn::MulAdd(p, r, c(9.61823749e-3));
    p = hn::MulAdd(p, r, c(5.55035743e-2));
    p = hn::MulAdd(p, r, c(0.240226498));
    p = hn::MulAdd(p, r, c(0.693147188));
    return {hn::Mul(r, p), n};
  } else {
    const V y = hn::Mul(r, c(hs::kLn2));
    return {hn::Mul(y, hs::ExpSeries(d, y)), n};
  }
}

// 2^t h.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Decayed(D d, const Decay<V>& decay, V h) {
  return hs::ScaleByPowerOfTwo(d, hn::MulAdd(decay.fraction, h, h), decay.exponent);
}

// 2^n.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V PowerOf(D d, const Decay<V>& decay) {
  return hs::ScaleByPowerOfTwo(d, hn::Set(d, hn::TFromD<D>{1}), decay.exponent);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_DECAY_INL_H_
