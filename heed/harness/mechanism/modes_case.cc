// Error bounds of rows through state space models, in chunks of 16 tokens or as convolutions.
#include "heed/harness/mechanism/modes_case.h"

#include <algorithm>
#include <cmath>

#include "heed/engines/scan/convolution.h"
#include "heed/harness/mechanism/convolution_case.h"

namespace heed::scanning {
namespace {

using mechanism::Add;
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

constexpr size_t kChunk = 16;

// The relative error of a mode's number in the tables, and of its powers up to 16: one rounding, plus the errors of
// computing it in f64, from the argument and the operations.
double TableError(const Mode& m, double u) { return u + 0x1p-52 * (60 + 3 * kChunk * std::abs(m.z)); }

// States are rounded at the ends of chunks, and at each token after the last chunk.
ModePass PassOf(const Mode& m, const Inexact& inputs, double factor, double size, double u) {
  ModePass pass;
  double error = 0;
  const double a = std::abs(m.a), table = TableError(m, u);
  const size_t T = inputs.values.size();
  pass.size.reserve(T);
  pass.error.reserve(T);
  for (size_t t = 0; t < T; ++t) {
    size = a * size + factor * std::abs(inputs.values[t]);
    error = a * error + factor * inputs.errors[t];
    const bool in_chunk = t < T / kChunk * kChunk;
    // 16 products are summed, with two more for complex numbers; for single tokens three.
    if (!in_chunk) error += (6 * u + table) * size;
    if (in_chunk && t % kChunk == kChunk - 1) error += (28 * u + 2 * table) * size;
    pass.size.push_back(size);
    pass.error.push_back(error);
  }
  return pass;
}

// The initial magnitude of a recurrence whose first step does not decay.
double SizeBefore(const Mode& m, const Complex& last) { return std::abs(last) / std::max(std::abs(m.a), 1e-300); }

Inexact Impulse(size_t count) {
  Doubles values(count, 0.0);
  if (count > 0) values[0] = 1;
  return Inexact(values);
}

}  // namespace

double ModesRow::OutputAt(size_t t) const {
  double o = 0;
  for (size_t n = 0; n < N(); ++n) o += 2 * (modes[n].C * h[t + 1][n]).real();
  return o + D * u[t];
}

double ModesRow::InputGradientAt(size_t t, const Doubles& dy, const std::vector<Complexes>& l) const {
  double du = 0;
  for (size_t n = 0; n < N(); ++n) du += (modes[n].b * l[t][n]).real();
  return du + D * dy[t];
}

ModesRow ModesOf(const ModeTensors<ConstTensorView>& in, bool bilinear, int64_t d) {
  ModesRow c = {};
  c.channel = d;
  c.dt = std::exp(At(in.log_dt, {d}));
  c.D = in.D.present() ? At(in.D, {d}) : 0;
  for (int64_t n = 0; n < in.log_A_real.size(1); ++n) {
    Mode mode;
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

void TakeStatesThrough(ModesRow& c) {
  c.h.resize(c.T() + 1, Complexes(c.N()));
  for (size_t t = 0; t < c.T(); ++t) {
    const Complexes& before = c.h[t];
    Complexes& after = c.h[t + 1];
    for (size_t n = 0; n < c.N(); ++n) after[n] = c.modes[n].a * before[n] + c.modes[n].b * c.u[t];
  }
}

std::vector<Complexes> GradientsOf(const ModesRow& c, const Doubles& dy, const Complexes& last) {
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

Inexact TapsOf(const ModesRow& c, size_t count, double u) {
  const Inexact impulse = Impulse(count);
  Inexact taps(Doubles(count, 0.0));
  ModePasses passes;
  for (const Mode& m : c.modes) {
    passes.push_back(PassOf(m, impulse, std::abs(m.b), 0, u));
    Complex h = m.b;
    for (size_t l = 0; l < count; ++l, h *= m.a) taps.values[l] += 2 * (m.C * h).real();
  }
  ModesRow without = {};
  without.modes = c.modes;
  taps.errors = OutputErrors(without, impulse, false, passes, u);
  return taps;
}

Inexact Inexact::Reversed() const {
  Inexact back = *this;
  std::reverse(back.values.begin(), back.values.end());
  std::reverse(back.errors.begin(), back.errors.end());
  return back;
}

ModePasses StatePasses(const ModesRow& c, const Inexact& inputs, double u) {
  ModePasses passes;
  for (size_t n = 0; n < c.N(); ++n) {
    passes.push_back(PassOf(c.modes[n], inputs, std::abs(c.modes[n].b), std::abs(c.h[0][n]), u));
  }
  return passes;
}

ModePasses GradientPasses(const ModesRow& c, const Inexact& dy_from_end, const Complexes& last, double u) {
  ModePasses passes;
  for (size_t n = 0; n < c.N(); ++n) {
    const Mode& m = c.modes[n];
    passes.push_back(PassOf(m, dy_from_end, 2 * std::abs(m.C), SizeBefore(m, last[n]), u));
  }
  return passes;
}

double StateError(const ModePass& pass) { return pass.error.empty() ? 0 : 1.01 * pass.error.back(); }

double InitialGradientError(const Mode& m, const ModePass& pass, double u) {
  if (pass.error.empty()) return 0;
  return 1.01 * std::abs(m.a) * (pass.error.back() + (34 * u + 2 * TableError(m, u)) * pass.size.back());
}

// An output is N products with states, plus 16 taps within a chunk.
Doubles OutputErrors(const ModesRow& c, const Inexact& x, bool back, const ModePasses& passes, double u) {
  Doubles errors(x.values.size());
  const double chain = (2 * static_cast<double>(c.N()) + 26) * u;
  for (size_t t = 0; t < errors.size(); ++t) {
    // D x is one product, added last.
    errors[t] = std::abs(c.D) * (x.errors[t] + 2 * u * std::abs(x.values[t]));
  }
  for (size_t n = 0; n < c.N(); ++n) {
    const Mode& m = c.modes[n];
    const double read = back ? std::abs(m.b) : 2 * std::abs(m.C), table = TableError(m, u);
    for (size_t t = 0; t < errors.size(); ++t) {
      const double here = passes[n].error[t] + (chain + 2 * table) * passes[n].size[t];
      errors[t] += read * here;
      // Within a chunk nothing is rounded yet: adds the rounding at its end.
      errors[t] += read * (28 * u + 2 * table) * passes[n].size[t];
    }
  }
  return errors;
}

// The convolution adds its own errors to those of the taps.
Doubles ConvolvedErrors(const ModesRow& c, const Inexact& taps, const Inexact& x, bool back, int64_t most, double u) {
  const size_t T = x.values.size();
  Doubles errors = ConvolutionErrors(taps.values, x.values, c.D, most, back, u);
  const Doubles of_taps = ConvolvedMagnitudes(taps.errors, x.values, T);
  const Doubles of_x = ConvolvedMagnitudes(taps.values, x.errors, T);
  for (size_t t = 0; t < T; ++t) {
    errors[t] += of_taps[t] + 1.01 * of_x[t] + std::abs(c.D) * x.errors[t];
  }
  return errors;
}

void AddParameterErrors(const ModesRow& c, const Inexact& inputs, const Inexact& dy, const Complexes& last, bool is_f64,
                        double u, const ModeTensors<TensorView>& tolerance, size_t rows) {
  const int64_t d = c.channel;
  const size_t T = inputs.values.size();
  const Inexact back = dy.Reversed();
  // 16 terms, 16 more of lags, 8 chunks; longer sums are in f64, for f64 too.
  const double chunks = static_cast<double>(T) / 128 * static_cast<double>(rows);
  const double sums = (64 + (is_f64 ? chunks + static_cast<double>(rows) : 0)) * u;
  for (size_t n = 0; n < c.N(); ++n) {
    const Mode& m = c.modes[n];
    const double h0 = std::abs(c.h[0][n]);
    const ModePass h = PassOf(m, inputs, std::abs(m.b), h0, u);
    const ModePass l = PassOf(m, back, 2 * std::abs(m.C), SizeBefore(m, last[n]), u);
    const double table = TableError(m, u), relative = sums + 4 * table;
    double of_a = 0, of_b = 0, of_C = 0;
    for (size_t t = 0; t < T; ++t) {
      const double size_l = l.size[T - 1 - t];
      // Gradients are rounded at the ends of chunks in reverse order too.
      const double error_l = l.error[T - 1 - t] + 34 * u * size_l + 2 * table * size_l;
      const double before = t == 0 ? h0 : h.size[t - 1], after = h.size[t];
      const double of_before = t == 0 ? 0 : h.error[t - 1] + 34 * u * before;
      of_a += error_l * before + size_l * of_before + relative * size_l * before;
      of_b += (error_l + relative * size_l) * std::abs(inputs.values[t]) + size_l * inputs.errors[t];
      of_C += 2 * (std::abs(dy.values[t]) * (h.error[t] + (34 * u + relative) * after) + dy.errors[t] * after);
    }
    const double a_slope = std::abs(m.a_slope), b_slope = std::abs(m.b_slope), z = std::abs(m.z);
    const double of_z = of_a * a_slope + of_b * b_slope;
    const auto mode = static_cast<int64_t>(n);
    const auto add = [&](const TensorView& to, std::initializer_list<int64_t> at, double error) {
      Add(to, at, 1.01 * error + 1e-290);
    };
    add(tolerance.log_dt, {d}, of_z * z + of_b * std::abs(m.b));
    add(tolerance.log_A_real, {d, mode}, of_z * std::abs(m.z.real()));
    add(tolerance.A_imag, {d, mode}, of_z * c.dt);
    for (const int64_t part : {0, 1}) add(tolerance.C, {d, mode, part}, of_C);
  }
}

void TapGradients::Add(const Inexact& inputs, const Inexact& dy, int64_t most, bool is_f64, double u) {
  const size_t T = inputs.values.size();
  taps_.values.resize(static_cast<size_t>(most));
  taps_.errors.resize(static_cast<size_t>(most));
  const Doubles own = TapErrors(inputs.values, dy.values, T, most, is_f64, u);
  for (size_t s = 0; s < T; ++s) taps_.errors[s] += own[s];
  for (size_t t = 0; t < T; ++t) {
    for (size_t s = 0; s <= t; ++s) {
      taps_.values[s] += dy.values[t] * inputs.values[t - s];
      taps_.errors[s] +=
          1.01 * (dy.errors[t] * std::abs(inputs.values[t - s]) + std::abs(dy.values[t]) * inputs.errors[t - s]);
    }
  }
}

void TapGradients::AddParameterErrors(const ModesRow& row, bool is_f64, double u,
                                      const ModeTensors<TensorView>& tolerance) const {
  Inexact dy = taps_;
  for (size_t s = 0; s < dy.values.size(); ++s) dy.errors[s] += u * std::abs(dy.values[s]);
  ModesRow of_taps = row;
  of_taps.h.assign(1, Complexes(row.N()));
  scanning::AddParameterErrors(of_taps, Impulse(dy.values.size()), dy, Complexes(row.N()), is_f64, u, tolerance);
}

bool IsConvolved(int64_t modes, bool may_choose, bool wants_convolution, bool states) {
  return !states && (wants_convolution || (may_choose && modes > scan::kModesPerTransformed));
}

}  // namespace heed::scanning
