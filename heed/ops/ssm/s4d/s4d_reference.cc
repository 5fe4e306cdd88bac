// S4D as it is defined, in double, a channel and a token at a time.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/ops/ssm/s4d/s4d_reference_internal.h"

namespace heed::s4d {
namespace {

using parts::At;
using parts::Put;

// (e^z - 1) / z and its derivative: by their series where the quotients would cancel.
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

ReferenceChannel ChannelOf(const Inputs& in, const Options& options, int64_t d) {
  ReferenceChannel c = {};
  c.dt = std::exp(At(in.log_dt, {d}));
  c.D = in.D.present() ? At(in.D, {d}) : 0;
  for (int64_t n = 0; n < in.log_A_real.size(1); ++n) {
    ReferenceMode mode;
    const Complex A(-std::exp(At(in.log_A_real, {d, n})), At(in.A_imag, {d, n}));
    mode.C = {At(in.C, {d, n, 0}), At(in.C, {d, n, 1})};
    mode.z = c.dt * A;
    if (options.discretization == Discretization::kBilinear) {
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

void ForEachChannel(const Inputs& in, const Options& options,
                    const std::function<void(const ReferenceChannel&)>& f) {
  for (const auto& place :
       scanning::PlacesOf(in.u.size(0), in.u.size(2), in.u.size(1), options)) {
    const int64_t d = place.channel;
    ReferenceChannel c = ChannelOf(in, options, d);
    c.place = place;
    c.h.emplace_back(c.N());
    for (size_t n = 0; n < c.N() && in.initial.present(); ++n) {
      const auto mode = static_cast<int64_t>(n);
      c.h[0][n] = {At(in.initial, {place.sequence, d, mode, 0}),
                   At(in.initial, {place.sequence, d, mode, 1})};
    }
    for (const int64_t token : place.tokens) {
      c.u.push_back(At(in.u, {place.batch, d, token}));
      std::vector<Complex> h(c.N());
      for (size_t n = 0; n < c.N(); ++n) {
        h[n] = c.modes[n].a * c.h.back()[n] + c.modes[n].b * c.u.back();
      }
      c.h.push_back(h);
    }
    f(c);
  }
}

Doubles IncomingOf(const BackwardInputs& in, const ReferenceChannel& c) {
  Doubles dy;
  for (const int64_t token : c.place.tokens) {
    dy.push_back(At(in.d_o, {c.place.batch, c.place.channel, token}));
  }
  return dy;
}

std::vector<std::vector<Complex>> GradientsOf(const BackwardInputs& in, const ReferenceChannel& c,
                                              const Doubles& dy) {
  std::vector<std::vector<Complex>> l(c.T() + 1, std::vector<Complex>(c.N()));
  for (size_t n = 0; n < c.N(); ++n) {
    if (in.d_final.present()) {
      const auto mode = static_cast<int64_t>(n);
      l[c.T()][n] = {At(in.d_final, {c.place.sequence, c.place.channel, mode, 0}),
                     -At(in.d_final, {c.place.sequence, c.place.channel, mode, 1})};
    }
    Complex after = l[c.T()][n];
    for (size_t t = c.T(); t-- > 0;) {
      l[t][n] = 2 * dy[t] * c.modes[n].C + after;
      after = c.modes[n].a * l[t][n];
    }
  }
  return l;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  parts::Clear(out.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const int64_t d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      double o = c.D * c.u[t];
      for (size_t n = 0; n < c.N(); ++n) o += 2 * (c.modes[n].C * c.h[t + 1][n]).real();
      Put(out.o, {c.place.batch, d, c.place.tokens[t]}, o);
    }
    for (size_t n = 0; n < c.N(); ++n) {
      const auto mode = static_cast<int64_t>(n);
      Put(out.final, {c.place.sequence, d, mode, 0}, c.h.back()[n].real());
      Put(out.final, {c.place.sequence, d, mode, 1}, c.h.back()[n].imag());
    }
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  for (const TensorView* t : {&out.du, &out.dlog_dt, &out.dlog_A_real, &out.dA_imag, &out.dC, &out.dD}) {
    parts::Clear(*t);
  }
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const int64_t d = c.place.channel;
    const Doubles dy = IncomingOf(in, c);
    const auto l = GradientsOf(in, c, dy);
    for (size_t t = 0; t < c.T(); ++t) {
      double du = c.D * dy[t];
      for (size_t n = 0; n < c.N(); ++n) du += (c.modes[n].b * l[t][n]).real();
      Put(out.du, {c.place.batch, d, c.place.tokens[t]}, du);
      parts::Add(out.dD, {d}, dy[t] * c.u[t]);
    }
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
      // z = dt A; b is dt times something of z.
      parts::Add(out.dlog_dt, {d}, (of_z * m.z + of_b * m.b).real());
      parts::Add(out.dlog_A_real, {d, mode}, (of_z * m.z.real()).real());
      parts::Add(out.dA_imag, {d, mode}, (of_z * Complex(0, c.dt)).real());
      parts::Add(out.dC, {d, mode, 0}, of_C.real());
      parts::Add(out.dC, {d, mode, 1}, -of_C.imag());
      const Complex before = c.T() == 0 ? l[0][n] : m.a * l[0][n];
      Put(out.dinitial, {c.place.sequence, d, mode, 0}, before.real());
      Put(out.dinitial, {c.place.sequence, d, mode, 1}, -before.imag());
    }
  });
}

}  // namespace heed::s4d
