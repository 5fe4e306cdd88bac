// S4D in the harness.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "heed/harness/mechanism/modes_case.h"
#include "heed/harness/mechanism/scanning_case.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"

namespace heed::s4d {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Put;
using scanning::Complexes;
using scanning::Doubles;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Inexact;
using scanning::ModePasses;
using scanning::Stored;

bool IsBilinear(const Options& options) { return options.discretization == Discretization::kBilinear; }

struct Channel : scanning::ModesRow {
  scanning::ChannelPlace place;
};

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const Channel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.u.size(0), in.u.size(2), in.u.size(1), options)) {
    const int64_t d = place.channel;
    Channel c = {scanning::ModesOf(scanning::ModesIn(in), IsBilinear(options), d), place};
    c.h.emplace_back(c.N());
    for (size_t n = 0; n < c.N() && in.initial.S.present(); ++n) {
      const auto mode = static_cast<int64_t>(n);
      c.h[0][n] = {At(in.initial.S, {place.sequence, d, mode, 0}), At(in.initial.S, {place.sequence, d, mode, 1})};
    }
    for (const int64_t token : place.tokens) c.u.push_back(At(in.u, {place.batch, d, token}));
    scanning::TakeStatesThrough(c);
    f(c);
  }
}

Doubles IncomingOf(const BackwardInputs& in, const Channel& c) {
  Doubles dy;
  for (const int64_t token : c.place.tokens) {
    dy.push_back(At(in.d_o, {c.place.batch, c.place.channel, token}));
  }
  return dy;
}

Complexes FinalGradientsOf(const BackwardInputs& in, const Channel& c) {
  Complexes last(c.N());
  for (size_t n = 0; n < c.N() && in.d_final.S.present(); ++n) {
    const auto mode = static_cast<int64_t>(n);
    last[n] = {At(in.d_final.S, {c.place.sequence, c.place.channel, mode, 0}),
               -At(in.d_final.S, {c.place.sequence, c.place.channel, mode, 1})};
  }
  return last;
}

bool HasTaps(const Inputs& in, const Options& options, bool states) {
  return scanning::IsConvolved(in.log_A_real.size(1), options.method == Method::kAuto,
                               options.method == Method::kConvolution, states);
}

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.u.dtype()));
  const bool has_taps = HasTaps(in, options, in.initial.S.present() || tolerance.final.S.present());
  mechanism::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const Channel& c) {
    const Inexact u(c.u);
    const ModePasses passes = StatePasses(c, u, e.unit);
    const Doubles errors = has_taps ? ConvolvedErrors(c, TapsOf(c, c.T(), e.unit), u, false, in.u.size(2), e.unit)
                                    : OutputErrors(c, u, false, passes, e.unit);
    const auto& [sequence, batch, d, tokens] = c.place;
    for (size_t t = 0; t < c.T(); ++t) {
      Put(tolerance.o, {batch, d, tokens[t]}, Stored(c.OutputAt(t), errors[t], e));
    }
    for (size_t n = 0; n < c.N(); ++n) {
      const double error = c.T() == 0 ? 0 : StateError(passes[n]) + state.least;
      const auto mode = static_cast<int64_t>(n);
      for (const int64_t part : {0, 1}) Put(tolerance.final.S, {sequence, d, mode, part}, error);
    }
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.u.dtype()));
  const double u = e.unit;
  const bool is_f64 = in.u.dtype() == DType::kF64;
  const bool has_taps =
      HasTaps(in, options, in.initial.S.present() || in.d_final.S.present() || tolerance.initial.S.present());
  for (const TensorView* t :
       {&tolerance.u, &tolerance.log_dt, &tolerance.log_A_real, &tolerance.A_imag, &tolerance.C, &tolerance.D}) {
    mechanism::Clear(*t);
  }
  std::map<int64_t, scanning::TapGradients> of_taps;  // per channel, over all its sequences
  const int64_t most = in.u.size(2);
  ForEachChannel(in, options, [&](const Channel& c) {
    const auto& [sequence, batch, d, tokens] = c.place;
    const Inexact inputs(c.u), dy(IncomingOf(in, c)), back = dy.Reversed();
    const Complexes last = FinalGradientsOf(in, c);
    const auto l = GradientsOf(c, dy.values, last);
    const ModePasses passes = GradientPasses(c, back, last, u);
    const Doubles errors = has_taps ? ConvolvedErrors(c, TapsOf(c, c.T(), u), back, true, most, u)
                                    : OutputErrors(c, back, true, passes, u);
    for (size_t t = 0; t < c.T(); ++t) {
      const double du = c.InputGradientAt(t, dy.values, l);
      Put(tolerance.u, {batch, d, tokens[t]}, Stored(du, errors[c.T() - 1 - t], e));
      Add(tolerance.D, {d}, 132 * u * std::abs(dy.values[t] * c.u[t]) + e.least);
    }
    for (size_t n = 0; n < c.N(); ++n) {
      const double error = InitialGradientError(c.modes[n], passes[n], u);
      const auto mode = static_cast<int64_t>(n);
      for (const int64_t part : {0, 1}) {
        Put(tolerance.initial.S, {sequence, d, mode, part}, c.T() == 0 ? 0 : error + state.least);
      }
    }
    if (has_taps) {
      of_taps[d].Add(inputs, dy, most, is_f64, u);
    } else {
      AddParameterErrors(c, inputs, dy, last, is_f64, u, scanning::ModesIn(tolerance));
    }
  });
  for (const auto& [d, taps] : of_taps) {
    taps.AddParameterErrors(scanning::ModesOf(scanning::ModesIn(in), IsBilinear(options), d), is_f64, u,
                            scanning::ModesIn(tolerance));
  }
  scanning::RoundSums(in.log_dt, expected.log_dt, tolerance.log_dt);
  scanning::RoundSums(in.log_A_real, expected.log_A_real, tolerance.log_A_real);
  scanning::RoundSums(in.A_imag, expected.A_imag, tolerance.A_imag);
  scanning::RoundSums(in.C, expected.C, tolerance.C);
  scanning::RoundSums(in.D, expected.D, tolerance.D);
}

scanning::Mechanism MechanismOf(const Options& options) {
  const char* const methods[] = {"", " recurrent", " convolution"};
  return scanning::Bound<Structs, Options>(
      "s4d", DefinitionOf(options), options,
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance},
      std::string(methods[static_cast<int>(options.method)]) +
          (options.discretization == Discretization::kBilinear ? " bilinear" : ""));
}

// D = Hq D channels, T = Tq tokens, N = 32 modes.
Case MakeCase(const CaseRequest& request) {
  Options options;
  scanning::Choice choice;
  choice.states = 32;
  const mechanism::Words words(request.variant);
  if (words.Has("convolution")) options.method = Method::kConvolution;
  if (words.Has("bilinear")) options.discretization = Discretization::kBilinear;
  if (const auto number = words.Number("modes")) choice.states = static_cast<int64_t>(*number);
  return scanning::MakeCase(MechanismOf(options), request, choice);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Options options;
  options.method = static_cast<Method>(seed % 3);
  options.discretization = static_cast<Discretization>(seed / 3 % 2);
  return scanning::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  std::vector<std::string> variants = scanning::kVariants;
  variants.insert(variants.end(), {"convolution", "bilinear", "modes=5"});
  return scanning::EntryOf(MechanismOf({}), {.family = "ssm",
                                             .variants = variants,
                                             .flops = "8 N per token and channel, backward 24 N; Hq D channels, N = 32",
                                             .bytes = "2 B Tq Hq D size",
                                             .state = "B Hq D N 8",
                                             .make_case = &MakeCase,
                                             .random_case = &RandomCase});
}

}  // namespace heed::s4d
