// S4D in the harness.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "heed/engines/scan/convolution.h"
#include "heed/ops/parts/convolution_case.h"
#include "heed/ops/parts/scanning_case.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"
#include "heed/ops/ssm/s4d/s4d_reference_internal.h"

namespace heed::s4d {
namespace {

using parts::Add;
using parts::Put;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Stored;

constexpr size_t kChunk = 16;

// How far a number of a mode, and powers of it up to 16, may be off in the tables, relative: rounded
// once, and of f64 what computing it in f64 takes, of the argument and of the operations.
double TableError(const ReferenceMode& m, double u) {
  return u + 0x1p-52 * (60 + 3 * kChunk * std::abs(m.z));
}

// A walk of one mode in absolute values, from its first token: sizes that no sum of its terms exceeds,
// and their errors. Rounding happens at the ends of chunks, and at each token after the last.
struct Walk {
  Doubles size, error;  // after each token
};
Walk WalkOf(const ReferenceMode& m, const Doubles& inputs, const Doubles& of_inputs, double factor,
            double size, double error, double u) {
  Walk walk;
  const double a = std::abs(m.a), table = TableError(m, u);
  for (size_t t = 0; t < inputs.size(); ++t) {
    size = a * size + factor * std::abs(inputs[t]);
    error = a * error + factor * of_inputs[t];
    const bool in_chunk = t < inputs.size() / kChunk * kChunk;
    // 16 products added up, two more of complex numbers; of one token three.
    if (!in_chunk) error += (6 * u + table) * size;
    if (in_chunk && t % kChunk == kChunk - 1) error += (28 * u + 2 * table) * size;
    walk.size.push_back(size);
    walk.error.push_back(error);
  }
  return walk;
}

Doubles Zeros(const Doubles& x) { return Doubles(x.size(), 0.0); }

// Errors of the output of all modes: what is read off states is N products, and 16 taps in a chunk.
Doubles OutputErrors(const ReferenceChannel& c, const Doubles& x, const Doubles& of_x, bool back,
                     const std::vector<Walk>& walks, double u) {
  Doubles errors(x.size());
  const double chain = (2 * static_cast<double>(c.N()) + 26) * u;
  for (size_t t = 0; t < x.size(); ++t) {
    // Eight products are added to D x, and three sums.
    errors[t] = std::abs(c.D) * (of_x[t] + 14 * u * std::abs(x[t]));
    for (size_t n = 0; n < c.N(); ++n) {
      const ReferenceMode& m = c.modes[n];
      const double read = back ? std::abs(m.b) : 2 * std::abs(m.C);
      const double here = walks[n].error[t] + (chain + 2 * TableError(m, u)) * walks[n].size[t];
      errors[t] += read * here;
      // Within a chunk nothing has been rounded yet: what will be, once.
      errors[t] += read * (28 * u + 2 * TableError(m, u)) * walks[n].size[t];
    }
  }
  return errors;
}

// Whether the call is computed as a convolution, as the engine decides.
bool HasTaps(const Inputs& in, const Options& options, bool states) {
  const bool cheaper = options.method == Method::kAuto &&
                       in.log_A_real.size(1) > scan::kModesPerTransformed;
  return !states && (cheaper || options.method == Method::kConvolution);
}

// Errors of the first taps, and themselves.
Doubles TapsOf(const ReferenceChannel& c, size_t count, double u, Doubles& errors) {
  Doubles impulse(count, 0.0), taps(count, 0.0);
  if (count > 0) impulse[0] = 1;
  std::vector<Walk> walks;
  for (const ReferenceMode& m : c.modes) {
    walks.push_back(WalkOf(m, impulse, Zeros(impulse), std::abs(m.b), 0, 0, u));
    Complex h = m.b;
    for (size_t l = 0; l < count; ++l, h *= m.a) taps[l] += 2 * (m.C * h).real();
  }
  ReferenceChannel without = c;
  without.D = 0;
  errors = OutputErrors(without, impulse, Zeros(impulse), false, walks, u);
  return taps;
}

// Errors of the output as a convolution: of its taps, and its own.
Doubles ConvolvedErrors(const ReferenceChannel& c, const Doubles& x, bool back, int64_t most,
                        double u) {
  Doubles of_taps;
  const Doubles taps = TapsOf(c, x.size(), u, of_taps);
  Doubles errors = scanning::ConvolutionErrors(taps, x, c.D, most, back, u);
  const Doubles more = scanning::ConvolvedMagnitudes(of_taps, x, x.size());
  for (size_t t = 0; t < x.size(); ++t) errors[t] += more[t];
  return errors;
}

std::vector<Walk> StateWalks(const ReferenceChannel& c, double u) {
  std::vector<Walk> walks;
  for (size_t n = 0; n < c.N(); ++n) {
    const ReferenceMode& m = c.modes[n];
    walks.push_back(WalkOf(m, c.u, Zeros(c.u), std::abs(m.b), std::abs(c.h[0][n]), 0, u));
  }
  return walks;
}

void Tolerance(const Inputs& in, const Options& options, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  const Epsilon state = EpsilonOf(scanning::StateDType(in.u.dtype()));
  const bool has_taps = HasTaps(in, options, in.initial.present() || tolerance.final.present());
  parts::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const std::vector<Walk> walks = StateWalks(c, e.unit);
    const Doubles errors = has_taps ? ConvolvedErrors(c, c.u, false, in.u.size(2), e.unit)
                                    : OutputErrors(c, c.u, Zeros(c.u), false, walks, e.unit);
    const int64_t d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      double o = c.D * c.u[t];
      for (size_t n = 0; n < c.N(); ++n) o += 2 * (c.modes[n].C * c.h[t + 1][n]).real();
      Put(tolerance.o, {c.place.batch, d, c.place.tokens[t]}, Stored(o, errors[t], e));
    }
    for (size_t n = 0; n < c.N(); ++n) {
      const double error = c.T() == 0 ? 0 : 1.01 * walks[n].error.back() + state.least;
      const auto mode = static_cast<int64_t>(n);
      for (const int64_t part : {0, 1}) Put(tolerance.final, {c.place.sequence, d, mode, part}, error);
    }
  });
}

// Adds to the errors of parameters of a channel, from rows of inputs and of gradients of outputs.
struct Row {
  const Doubles &u, &dy, &of_dy;
  const std::vector<Complex>*initial, *final;  // null: zeros
};
void AddParameterErrors(const ReferenceChannel& c, const Row& row, bool is_f64, double u,
                        const Gradients& tolerance) {
  const int64_t d = c.place.channel;
  const size_t T = row.u.size();
  const Doubles back(row.dy.rbegin(), row.dy.rend()), of_back(row.of_dy.rbegin(), row.of_dy.rend());
  // 16 terms, 16 more of lags, 8 chunks, and what f64 adds up in f64 too.
  const double sums = (64 + (is_f64 ? static_cast<double>(T) / 128 : 0)) * u;
  for (size_t n = 0; n < c.N(); ++n) {
    const ReferenceMode& m = c.modes[n];
    const double h0 = row.initial == nullptr ? 0 : std::abs((*row.initial)[n]);
    const double lT = row.final == nullptr ? 0 : std::abs((*row.final)[n]) / std::max(std::abs(m.a), 1e-300);
    const Walk h = WalkOf(m, row.u, Zeros(row.u), std::abs(m.b), h0, 0, u);
    const Walk l = WalkOf(m, back, of_back, 2 * std::abs(m.C), lT, 0, u);
    const double relative = sums + 4 * TableError(m, u);
    double of_a = 0, of_b = 0, of_C = 0;
    for (size_t t = 0; t < T; ++t) {
      const double size_l = l.size[T - 1 - t];
      // Rounded at the ends of chunks of the other direction too.
      const double error_l = l.error[T - 1 - t] + 34 * u * size_l + 2 * TableError(m, u) * size_l;
      const double before = t == 0 ? h0 : h.size[t - 1], after = h.size[t];
      const double of_before = t == 0 ? 0 : h.error[t - 1] + 34 * u * before;
      of_a += error_l * before + size_l * of_before + relative * size_l * before;
      of_b += (error_l + relative * size_l) * std::abs(row.u[t]);
      of_C += 2 * (std::abs(row.dy[t]) * (h.error[t] + (34 * u + relative) * after) +
                   row.of_dy[t] * after);
    }
    const double a_slope = std::abs(m.a_slope), b_slope = std::abs(m.b_slope), z = std::abs(m.z);
    const double of_z = of_a * a_slope + of_b * b_slope;
    const auto mode = static_cast<int64_t>(n);
    const auto add = [&](const TensorView& to, std::initializer_list<int64_t> at, double error) {
      Add(to, at, 1.01 * error + 1e-290);
    };
    add(tolerance.dlog_dt, {d}, of_z * z + of_b * std::abs(m.b));
    add(tolerance.dlog_A_real, {d, mode}, of_z * std::abs(m.z.real()));
    add(tolerance.dA_imag, {d, mode}, of_z * c.dt);
    for (const int64_t part : {0, 1}) add(tolerance.dC, {d, mode, part}, of_C);
  }
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  const Epsilon state = EpsilonOf(scanning::StateDType(in.u.dtype()));
  const double u = e.unit;
  const bool is_f64 = in.u.dtype() == DType::kF64;
  const bool has_taps = HasTaps(
      in, options, in.initial.present() || in.d_final.present() || tolerance.dinitial.present());
  for (const TensorView* t : {&tolerance.du, &tolerance.dlog_dt, &tolerance.dlog_A_real,
                              &tolerance.dA_imag, &tolerance.dC, &tolerance.dD}) {
    parts::Clear(*t);
  }
  // Of convolutions: gradients of taps, over all sequences of a channel, and their errors.
  std::map<int64_t, std::pair<Doubles, Doubles>> of_taps;
  const int64_t most = in.u.size(2);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const int64_t d = c.place.channel;
    const Doubles dy = IncomingOf(in, c), back(dy.rbegin(), dy.rend());
    const auto l = GradientsOf(in, c, dy);
    std::vector<Walk> walks;
    for (size_t n = 0; n < c.N(); ++n) {
      const ReferenceMode& m = c.modes[n];
      const double last = std::abs(l[c.T()][n]) / std::max(std::abs(m.a), 1e-300);
      walks.push_back(WalkOf(m, back, Zeros(back), 2 * std::abs(m.C), last, 0, u));
    }
    const Doubles errors = has_taps ? ConvolvedErrors(c, back, true, most, u)
                                    : OutputErrors(c, back, Zeros(back), true, walks, u);
    for (size_t t = 0; t < c.T(); ++t) {
      double du = c.D * dy[t];
      for (size_t n = 0; n < c.N(); ++n) du += (c.modes[n].b * l[t][n]).real();
      Put(tolerance.du, {c.place.batch, d, c.place.tokens[t]}, Stored(du, errors[c.T() - 1 - t], e));
      Add(tolerance.dD, {d}, 132 * u * std::abs(dy[t] * c.u[t]) + e.least);
    }
    for (size_t n = 0; n < c.N(); ++n) {
      const double a = std::abs(c.modes[n].a);
      const double size = c.T() == 0 ? 0 : walks[n].size.back();
      const double error = c.T() == 0 ? 0 : a * (walks[n].error.back() + (34 * u + 2 * TableError(c.modes[n], u)) * size);
      const auto mode = static_cast<int64_t>(n);
      for (const int64_t part : {0, 1}) {
        Put(tolerance.dinitial, {c.place.sequence, d, mode, part}, c.T() == 0 ? 0 : 1.01 * error + state.least);
      }
    }
    if (!has_taps) {
      const Doubles exact = Zeros(dy);
      AddParameterErrors(c, {c.u, dy, exact, &c.h[0], &l[c.T()]}, is_f64, u, tolerance);
      return;
    }
    auto& [gradient, error] = of_taps[d];
    gradient.resize(static_cast<size_t>(most));
    error.resize(static_cast<size_t>(most));
    const Doubles own = scanning::TapErrors(c.u, dy, c.T(), most, is_f64, u);
    for (size_t s = 0; s < c.T(); ++s) {
      for (size_t t = s; t < c.T(); ++t) gradient[s] += dy[t] * c.u[t - s];
      error[s] += own[s];
    }
  });
  for (auto& [d, taps] : of_taps) {
    ReferenceChannel c = ChannelOf(in, options, d);
    c.place.channel = d;
    Doubles impulse(taps.first.size(), 0.0);
    if (!impulse.empty()) impulse[0] = 1;
    for (size_t s = 0; s < impulse.size(); ++s) taps.second[s] += u * std::abs(taps.first[s]);
    AddParameterErrors(c, {impulse, taps.first, taps.second, nullptr, nullptr}, is_f64, u, tolerance);
  }
  scanning::RoundSums(in.log_dt, expected.dlog_dt, tolerance.dlog_dt);
  scanning::RoundSums(in.log_A_real, expected.dlog_A_real, tolerance.dlog_A_real);
  scanning::RoundSums(in.A_imag, expected.dA_imag, tolerance.dA_imag);
  scanning::RoundSums(in.C, expected.dC, tolerance.dC);
  scanning::RoundSums(in.D, expected.dD, tolerance.dD);
}

scanning::Mechanism MechanismOf(const Options& options) {
  const char* const methods[] = {"", " recurrent", " convolution"};
  return scanning::Bound<Options>(
      "s4d", DefinitionOf(options), options,
      {&Forward, &Backward, &Reference, &BackwardReference, &Step, &Tolerance, &BackwardTolerance},
      std::string(methods[static_cast<int>(options.method)]) +
          (options.discretization == Discretization::kBilinear ? " bilinear" : ""));
}

// D = Hq D channels, T = Tq tokens, N = 32 modes.
Case MakeCase(const CaseRequest& request) {
  Options options;
  scanning::Choice choice;
  choice.states = 32;
  const std::string words = "+" + request.variant + "+";
  const auto has = [&](const std::string& word) {
    return words.find("+" + word + "+") != std::string::npos;
  };
  if (has("convolution")) options.method = Method::kConvolution;
  if (has("bilinear")) options.discretization = Discretization::kBilinear;
  if (const size_t at = words.find("+modes="); at != std::string::npos) {
    choice.states = std::stoll(words.substr(at + 7));
  }
  return scanning::MakeCase(MechanismOf(options), request, choice);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Options options;
  options.method = static_cast<Method>(seed % 3);
  options.discretization = static_cast<Discretization>(seed / 3 % 2);
  return scanning::RandomCase(MechanismOf(options), dtype, seed);
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  return scanning::CallOn(MechanismOf({}), ctx, tensors, scale);
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = scanning::kVariants;
  variants.insert(variants.end(), {"convolution", "bilinear", "modes=5"});
  return {.name = "s4d",
          .family = "ssm",
          .passes = {"forward", "backward", "step"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = variants,
          .flops = "8 N per token and channel, backward 24 N; Hq D channels, N = 32",
          .bytes = "2 B Tq Hq D size",
          .state = "B Hq D N 8",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = scanning::InputsOf(DefinitionOf({})),
          .call = &CallOn};
}

}  // namespace heed::s4d
