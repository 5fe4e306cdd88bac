// State space models of complex modes from the definition, in double, a token at a time.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/mechanism/reference/modes_reference_internal.h"

namespace heed::scanning {
namespace {

using mechanism::At;

// (e^z - 1) / z and its derivative, by their series where the quotients would cancel.
void Mean(Complex z, Complex& mean, Complex& slope) {
  if (std::abs(z) >= 2) {
    mean = (std::exp(z) - 1.0) / z;
    slope = (std::exp(z) - mean) / z;
    return;
  }
  mean = slope = 0;
  Complex term = 1;  // z^k / (k + 1)!
  for (int k = 0; k < 40; ++k) {
    mean += term;
    slope += static_cast<double>(k + 1) / (k + 2) * term;
    term *= z / static_cast<double>(k + 2);
  }
}

}  // namespace

// D x is added last: a sum that begins with it would be rounded at its magnitude once per mode, which exceeds the error
// bound of a convolution in f64.
double ReferenceRow::OutputAt(size_t t) const {
  double o = 0;
  for (size_t n = 0; n < N(); ++n) o += 2 * (modes[n].C * h[t + 1][n]).real();
  return o + D * u[t];
}

double ReferenceRow::InputGradientAt(size_t t, const Doubles& dy, const std::vector<Complexes>& l) const {
  double du = 0;
  for (size_t n = 0; n < N(); ++n) du += (modes[n].b * l[t][n]).real();
  return du + D * dy[t];
}

ReferenceRow ModesOf(const ModeTensors<ConstTensorView>& in, bool bilinear, int64_t d) {
  ReferenceRow c = {};
  c.channel = d;
  c.dt = std::exp(At(in.log_dt, {d}));
  c.D = in.D.present() ? At(in.D, {d}) : 0;
  for (int64_t n = 0; n < in.log_A_real.size(1); ++n) {
    ReferenceMode mode;
    const Complex A(-std::exp(At(in.log_A_real, {d, n})), At(in.A_imag, {d, n}));
    mode.C = {At(in.C, {d, n, 0}), At(in.C, {d, n, 1})};
    mode.z = c.dt * A;
    if (bilinear) {
      const Complex below = 1.0 - 0.5 * mode.z;
      mode.a = (1.0 + 0.5 * mode.z) / below;
      mode.b = c.dt / below;
      mode.a_slope = 1.0 / (below * below);
      mode.b_slope = 0.5 * c.dt / (below * below);
    } else {
      Complex mean, slope;
      Mean(mode.z, mean, slope);
      mode.a = mode.a_slope = std::exp(mode.z);
      mode.b = c.dt * mean;
      mode.b_slope = c.dt * slope;
    }
    c.modes.push_back(mode);
  }
  return c;
}

void Walk(ReferenceRow& c) {
  c.h.resize(c.T() + 1, Complexes(c.N()));
  for (size_t t = 0; t < c.T(); ++t) {
    const Complexes& before = c.h[t];
    Complexes& after = c.h[t + 1];
    for (size_t n = 0; n < c.N(); ++n) after[n] = c.modes[n].a * before[n] + c.modes[n].b * c.u[t];
  }
}

std::vector<Complexes> GradientsOf(const ReferenceRow& c, const Doubles& dy, const Complexes& last) {
  std::vector<Complexes> l(c.T() + 1, Complexes(c.N()));
  for (size_t n = 0; n < c.N(); ++n) {
    Complex after = l[c.T()][n] = last[n];
    for (size_t t = c.T(); t-- > 0;) {
      l[t][n] = 2 * dy[t] * c.modes[n].C + after;
      after = c.modes[n].a * l[t][n];
    }
  }
  return l;
}

Complexes InitialGradients(const ReferenceRow& c, const std::vector<Complexes>& l) {
  Complexes before = l[0];
  for (size_t n = 0; n < c.N() && c.T() > 0; ++n) before[n] *= c.modes[n].a;
  return before;
}

void AddParameterGradients(const ReferenceRow& c, const Doubles& dy, const std::vector<Complexes>& l,
                           const ModeTensors<TensorView>& out) {
  for (size_t t = 0; t < c.T(); ++t) mechanism::Add(out.D, {c.channel}, dy[t] * c.u[t]);
  for (size_t n = 0; n < c.N(); ++n) {
    const ReferenceMode& m = c.modes[n];
    Complex of_a = 0, of_b = 0, of_C = 0;
    for (size_t t = 0; t < c.T(); ++t) {
      of_a += l[t][n] * c.h[t][n];
      of_b += l[t][n] * c.u[t];
      of_C += 2 * dy[t] * c.h[t + 1][n];
    }
    const Complex of_z = of_a * m.a_slope + of_b * m.b_slope;
    const auto mode = static_cast<int64_t>(n);
    // z = dt A, and b is dt times a function of z.
    mechanism::Add(out.log_dt, {c.channel}, (of_z * m.z + of_b * m.b).real());
    mechanism::Add(out.log_A_real, {c.channel, mode}, (of_z * m.z.real()).real());
    mechanism::Add(out.A_imag, {c.channel, mode}, (of_z * Complex(0, c.dt)).real());
    mechanism::Add(out.C, {c.channel, mode, 0}, of_C.real());
    mechanism::Add(out.C, {c.channel, mode, 1}, -of_C.imag());
  }
}

}  // namespace heed::scanning
