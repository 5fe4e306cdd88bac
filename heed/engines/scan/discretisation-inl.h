// The discretisation of a state space: from rates and a step size to a and b of each mode, and its gradients, in
// double.
//
// Compiled once per SIMD target. With z = dt A, A = -exp(log_A_real) + i A_imag, dt = exp(log_dt):
//
//   zero-order hold   a = e^z,                    b = dt (e^z - 1) / z
//   bilinear          a = (1 + z/2) / (1 - z/2),  b = dt / (1 - z/2)
#if defined(HEED_ENGINES_SCAN_DISCRETISATION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SCAN_DISCRETISATION_INL_H_
#undef HEED_ENGINES_SCAN_DISCRETISATION_INL_H_
#else
#define HEED_ENGINES_SCAN_DISCRETISATION_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/core/carver.h"
#include "heed/core/dtype.h"
#include "heed/engines/scan/problem.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The modes of one channel: `width` real parts, then `width` imaginary parts, padded with zeros.
struct ChannelModes {
  double *a, *b, *c, *z;
  double dt;
  size_t width;

  void LayOut(size_t padded, Carver& carver) {
    width = padded;
    for (double** row : {&a, &b, &c, &z}) carver.Next(*row, static_cast<int64_t>(2 * width));
  }
};

inline double NumberAt(const Numbers& x, int64_t channel, size_t state = 0, int64_t part = 0) {
  return LoadAsDouble(x.dtype, x.data, channel * x.channel + static_cast<int64_t>(state) * x.state + part * x.part);
}

template <class V>
struct ComplexVector {
  V re, im;
};

template <class V>
HWY_INLINE ComplexVector<V> Quotient(ComplexVector<V> x, ComplexVector<V> y) {
  const V norm = hn::MulAdd(y.re, y.re, hn::Mul(y.im, y.im));
  return {hn::Div(hn::MulAdd(x.re, y.re, hn::Mul(x.im, y.im)), norm),
          hn::Div(hn::NegMulAdd(x.re, y.im, hn::Mul(x.im, y.re)), norm)};
}

// Highway's SinCos() is accurate for moderate angles only; the standard library is used beyond 3e4.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void SineAndCosine(D d, V x, V& sine, V& cosine) {
  hn::SinCos(d, x, sine, cosine);
  if (hn::AllFalse(d, hn::Gt(hn::Abs(x), hn::Set(d, 3e4)))) return;
  HWY_ALIGN double angle[hn::MaxLanes(D())], sines[hn::MaxLanes(D())];
  hn::Store(x, d, angle);
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    sines[i] = std::sin(angle[i]);
    angle[i] = std::cos(angle[i]);
  }
  sine = hn::Load(d, sines);
  cosine = hn::Load(d, angle);
}

// Computes a and b from vectors of z.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void DiscretiseVector(D d, bool bilinear, V dt, ComplexVector<V> z, ComplexVector<V>& a,
                                 ComplexVector<V>& b) {
  const V one = hn::Set(d, 1.0), half = hn::Set(d, 0.5), zero = hn::Zero(d);
  if (bilinear) {
    const V re = hn::Mul(half, z.re), im = hn::Mul(half, z.im);
    const ComplexVector<V> below = {hn::Sub(one, re), hn::Neg(im)};
    a = Quotient<V>({hn::Add(one, re), im}, below);
    b = Quotient<V>({dt, zero}, below);
    return;
  }
  // With z = x + i y, e^z - 1 has the real part (e^x - 1) cos y - 2 sin^2(y/2) and the imaginary part e^x sin y. Both
  // terms of the real part have the same sign if cos y >= 0, so that they do not cancel.
  V sine, cosine;
  SineAndCosine(d, hn::Mul(half, z.im), sine, cosine);
  const V less = hn::Expm1(d, z.re), two = hn::Add(one, one);
  const V cos_less = hn::Mul(hn::Neg(two), hn::Mul(sine, sine));  // cos y - 1
  const V sin_y = hn::Mul(two, hn::Mul(sine, cosine)), cos_y = hn::Add(one, cos_less);
  const V size_of_a = hn::Exp(d, z.re);
  a = {hn::Mul(size_of_a, cos_y), hn::Mul(size_of_a, sin_y)};
  const ComplexVector<V> rise = {hn::MulAdd(less, cos_y, cos_less), a.im};
  const ComplexVector<V> mean = Quotient<V>(rise, z);  // replaced by 1 if z is too small to divide by
  const V size = hn::Add(hn::Abs(z.re), hn::Abs(z.im));
  const auto tiny = hn::Lt(size, hn::Set(d, 1e-150));
  b = {hn::Mul(dt, hn::IfThenElse(tiny, one, mean.re)), hn::Mul(dt, hn::IfThenElse(tiny, zero, mean.im))};
}

HWY_NOINLINE HWY_ATTR inline void Discretise(const Problem& p, int64_t channel, ChannelModes& of) {
  const hn::ScalableTag<double> d;
  const auto modes = static_cast<size_t>(p.states);
  of.dt = std::exp(NumberAt(p.log_dt, channel));
  for (double* row : {of.a, of.b, of.c, of.z}) std::fill_n(row, 2 * of.width, 0.0);
  for (size_t n = 0; n < modes; ++n) {
    of.z[n] = NumberAt(p.log_A_real, channel, n);
    of.z[of.width + n] = of.dt * NumberAt(p.A_imag, channel, n);
    of.c[n] = NumberAt(p.C.constants, channel, n, 0);
    of.c[of.width + n] = NumberAt(p.C.constants, channel, n, 1);
  }
  const auto dt = hn::Set(d, of.dt);
  for (size_t n = 0; n < modes; n += hn::Lanes(d)) {
    ComplexVector<hn::Vec<decltype(d)>> z, a, b;
    // Bounds the rate, so that its square does not overflow; the decay is 0 in any case.
    const auto log_rate = hn::LoadU(d, of.z + n);
    z.re = hn::Max(hn::Neg(hn::Mul(dt, hn::Exp(d, log_rate))), hn::Set(d, -1e100));
    z.im = hn::LoadU(d, of.z + of.width + n);
    DiscretiseVector(d, p.bilinear, dt, z, a, b);
    // Restores NaN, because Highway's exponentials of NaN are 0.
    const auto lost = hn::Or(hn::IsNaN(hn::Add(log_rate, z.im)), hn::IsNaN(dt));
    for (auto* x : {&z.re, &a.re, &a.im, &b.re, &b.im}) {
      *x = hn::IfThenElse(lost, hn::Set(d, std::numeric_limits<double>::quiet_NaN()), *x);
    }
    const auto valid = hn::FirstN(d, HWY_MIN(hn::Lanes(d), modes - n));
    const auto store = [&](hn::Vec<decltype(d)> x, double* to)
                           HWY_ATTR { hn::StoreU(hn::IfThenElseZero(valid, x), d, to + n); };
    store(z.re, of.z);
    store(a.re, of.a);
    store(a.im, of.a + of.width);
    store(b.re, of.b);
    store(b.im, of.b + of.width);
  }
}

// Scalars, for computations that are done once per mode.
struct Complex64 {
  double re, im;
};
inline Complex64 operator+(Complex64 x, Complex64 y) { return {x.re + y.re, x.im + y.im}; }
inline Complex64 operator-(Complex64 x, Complex64 y) { return {x.re - y.re, x.im - y.im}; }
inline Complex64 operator*(Complex64 x, Complex64 y) { return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re}; }
inline Complex64 operator*(double x, Complex64 y) { return {x * y.re, x * y.im}; }
inline Complex64 operator/(Complex64 x, Complex64 y) {
  const double norm = y.re * y.re + y.im * y.im;
  return {(x.re * y.re + x.im * y.im) / norm, (x.im * y.re - x.re * y.im) / norm};
}

// Returns the derivative of (e^z - 1) / z, from its power series if the quotient would cancel.
inline Complex64 MeanSlope(Complex64 z, Complex64 power, Complex64 mean) {
  if (std::abs(z.re) + std::abs(z.im) >= 1) return (power - mean) / z;
  Complex64 sum = {0, 0}, term = {1, 0};  // z^(k-1) / (k-1)!
  for (int k = 1; k < 24; ++k) {
    sum = sum + (1.0 / (k + 1)) * term;
    term = (1.0 / k) * (term * z);
  }
  return sum;
}

// One mode's gradients of log_A_real and A_imag, and its part of the gradient of log_dt.
struct RateGradients {
  double log_dt, log_A_real, A_imag;
};
inline RateGradients GradientsOfRates(bool bilinear, double dt, Complex64 z, Complex64 a, Complex64 b, Complex64 d_a,
                                      Complex64 d_b) {
  Complex64 d_z, slope = {0, 0};
  const Complex64 mean = (1 / dt) * b;
  if (bilinear) {
    // da/dz = 1 / (1 - z/2)^2, and db/dz = dt/2 da/dz.
    slope = mean * mean;
    d_z = d_a * slope + (dt / 2) * (d_b * slope);
  } else {
    d_z = d_a * a + dt * (d_b * MeanSlope(z, a, mean));
  }
  // z = dt A, so dz / dlog dt = z, and dz / dlog_A_real = Re z.
  const Complex64 d_dt = d_z * z + d_b * b;
  return {d_dt.re, d_z.re * z.re, -dt * d_z.im};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SCAN_DISCRETISATION_INL_H_
