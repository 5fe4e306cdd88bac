// Decays 2^t, which are applied without being rounded.
//
// Compiled once per SIMD target. With t = n + r, |r| <= 1/2, and f = 2^r - 1,
//
//   2^t h = 2^n (h + f h)
//
// has an error of one rounding of h, however near to 1 or to 0 the decay is. A rounded decay of .999 would change a
// state by a thousand roundings over time, and h + (2^t - 1) h would keep rounding errors of values that a strong decay
// has removed.
#if defined(HEED_ENGINES_SCAN_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_DECAY_INL_H_
#undef HEED_ENGINES_SCAN_DECAY_INL_H_
#else
#define HEED_ENGINES_SCAN_DECAY_INL_H_
#endif

#include <array>
#include <cstddef>

#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

#if HEED_HAVE_SCALEF
template <class V>
struct Decay {
  V fraction, exponent;  // f and n
};
#else
template <class V>
struct Decay {
  V fraction, power;  // f and 2^n
};
#endif

// Clamps t, the logarithm of a decay to base 2, to a finite number whose decay is 0, so that its product with 0 is 0.
template <class D>
HWY_INLINE hn::Vec<D> ClampLog2Decay(D d, hn::Vec<D> t) {
  return hs::AtLeast(d, t, hn::TFromD<D>{-1e15});
}

#if HEED_HAVE_SCALEF

template <class D, class V = hn::Vec<D>>
HWY_INLINE Decay<V> DecayOf(D d, V t) {
  using T = hn::TFromD<D>;
  const auto c = [d](double v) HWY_ATTR { return hn::Set(d, static_cast<T>(v)); };
  constexpr int kFromNearest = 8;  // t minus the nearest integer, without exceptions
  V r;
  if constexpr (sizeof(T) == 4) {
    r = V{_mm512_reduce_ps(t.raw, kFromNearest)};
  } else {
    r = V{_mm512_reduce_pd(t.raw, kFromNearest)};
  }
  const V n = hn::Sub(t, r);
  if constexpr (sizeof(T) == 4) {  // the minimax polynomial of (2^r - 1) / r, within 1.1e-8
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

// Computes the decays of kCount logarithms.
template <size_t kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void DecaysOf(D d, const V* t, Decay<V>* decays) {
  HWY_UNROLL(4)
  for (size_t i = 0; i < kCount; ++i) decays[i] = DecayOf(d, t[i]);
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

// True if 2^t is 1 + f.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto IsNearOne(D d, const Decay<V>& decay) {
  return hn::Eq(decay.exponent, hn::Zero(d));
}

#else

// The minimax polynomial of (2^r - 1) / r for |r| <= 1/2, from the highest power down; within 1.1e-8 in f32, 1.3e-17 in
// f64.
template <class T>
inline constexpr auto kSlopeSeries = [] {
  if constexpr (sizeof(T) == 4) {
    return std::array{1.54035124e-4f, 1.33907355e-3f, 9.61823749e-3f, 5.55035743e-2f, 0.240226498f, 0.693147188f};
  } else {
    return std::array{4.45667557101388223e-10, 7.07258618134636709e-9, 1.01780517273991858e-7, 1.32154425866128705e-6,
                      1.52527338532823530e-5,  1.54035304417385134e-4, 1.33335581463960016e-3, 9.61812910760688681e-3,
                      5.55041086648216598e-2,  0.240226506959100982,   0.693147180559945309};
  }
}();

// Computes the decays of kCount logarithms side by side, because each is a chain of 12 dependent operations. n is at
// least -127 (-1023 in f64), where the power is 0, and at most 127 (1023), to which larger exponents are clamped.
template <size_t kCount, class D, class V = hn::Vec<D>>
HWY_INLINE void DecaysOf(D d, const V* t, Decay<V>* decays) {
  using T = hn::TFromD<D>;
  V r[kCount], slope[kCount];
  HWY_UNROLL(4)
  for (size_t i = 0; i < kCount; ++i) r[i] = hs::WithinLimit(d, t[i], hs::kPowerLimit<T>);
  HWY_UNROLL(4)
  for (size_t i = 0; i < kCount; ++i) {
    const hs::RoundedPower<V> rounded = hs::RoundedPowerOf(d, r[i]);
    r[i] = hn::Sub(r[i], rounded.n);
    decays[i].power = rounded.power;
  }
  HWY_UNROLL(4)
  for (size_t i = 0; i < kCount; ++i) slope[i] = hn::Set(d, kSlopeSeries<T>[0]);
  for (size_t k = 1; k < kSlopeSeries<T>.size(); ++k) {
    HWY_UNROLL(4)
    for (size_t i = 0; i < kCount; ++i) slope[i] = hn::MulAdd(slope[i], r[i], hn::Set(d, kSlopeSeries<T>[k]));
  }
  HWY_UNROLL(4)
  for (size_t i = 0; i < kCount; ++i) decays[i].fraction = hn::Mul(r[i], slope[i]);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE Decay<V> DecayOf(D d, V t) {
  Decay<V> decay;
  DecaysOf<1>(d, &t, &decay);
  return decay;
}

// 2^t h.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Decayed(D, const Decay<V>& decay, V h) {
  const V scaled = hn::Mul(h, decay.power);
  return hn::MulAdd(decay.fraction, scaled, scaled);
}

// 2^n.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V PowerOf(D, const Decay<V>& decay) {
  return decay.power;
}

// True if 2^t is 1 + f.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto IsNearOne(D d, const Decay<V>& decay) {
  return hn::Eq(decay.power, hn::Set(d, hn::TFromD<D>{1}));
}

#endif  // HEED_HAVE_SCALEF

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_DECAY_INL_H_
