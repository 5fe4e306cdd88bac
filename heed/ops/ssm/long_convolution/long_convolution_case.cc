// The long convolution in the harness.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "heed/harness/mechanism/convolution_case.h"
#include "heed/harness/mechanism/scanning_case.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {
namespace {

using mechanism::At;
using mechanism::Put;
using scanning::Doubles;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Stored;

// One channel of a sequence.
struct Channel {
  scanning::ChannelPlace place;
  Doubles u;     // [T]
  Doubles taps;  // [min(L, T)]
  double D;      // 0 if absent

  size_t T() const { return u.size(); }
};

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const Channel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.u.size(0), in.u.size(2), in.u.size(1), options)) {
    const int64_t b = place.batch, d = place.channel;
    Channel c = {place, {}, {}, in.D.present() ? At(in.D, {d}) : 0};
    for (const int64_t token : place.tokens) c.u.push_back(At(in.u, {b, d, token}));
    const auto T = static_cast<int64_t>(c.T());
    for (int64_t s = 0; s < std::min(in.kernel.size(1), T); ++s) {
      c.taps.push_back(At(in.kernel, {d, s}));
    }
    f(c);
  }
}

// sum_s taps[s] x[t - s] for the first `count` tokens t.
Doubles Convolved(const Doubles& taps, const Doubles& x, size_t count) {
  Doubles sums(count, 0.0);
  for (size_t s = 0; s < std::min(taps.size(), count); ++s) {
    for (size_t t = s; t < count; ++t) sums[t] += taps[s] * x[t - s];
  }
  return sums;
}

// The gradient of o, in the order of tokens.
Doubles IncomingOf(const BackwardInputs& in, const Channel& c) {
  Doubles dy;
  for (const int64_t token : c.place.tokens) {
    dy.push_back(At(in.d_o, {c.place.batch, c.place.channel, token}));
  }
  return dy;
}

Doubles FromItsEnd(const Doubles& x) { return {x.rbegin(), x.rend()}; }

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  mechanism::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const Channel& c) {
    const Doubles sums = Convolved(c.taps, c.u, c.T());
    const Doubles errors = scanning::ConvolutionErrors(c.taps, c.u, c.D, in.kernel.size(1), false, e.unit);
    for (size_t t = 0; t < c.T(); ++t) {
      Put(tolerance.o, {c.place.batch, c.place.channel, c.place.tokens[t]},
          Stored(sums[t] + c.D * c.u[t], errors[t], e));
    }
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  for (const TensorView* t : {&tolerance.u, &tolerance.kernel, &tolerance.D}) mechanism::Clear(*t);
  ForEachChannel(in, options, [&](const Channel& c) {
    const int64_t d = c.place.channel;
    const Doubles dy = IncomingOf(in, c);
    const Doubles back = FromItsEnd(dy), sums = Convolved(c.taps, back, c.T());
    const int64_t L = in.kernel.size(1);
    const Doubles errors = scanning::ConvolutionErrors(c.taps, back, c.D, L, true, e.unit);
    const Doubles of_taps = scanning::TapErrors(c.u, dy, c.taps.size(), L, in.u.dtype() == DType::kF64, e.unit);
    for (size_t t = 0; t < c.T(); ++t) {
      const size_t r = c.T() - 1 - t;
      Put(tolerance.u, {c.place.batch, d, c.place.tokens[t]}, Stored(sums[r] + c.D * dy[t], errors[r], e));
      mechanism::Add(tolerance.D, {d}, 132 * e.unit * std::abs(dy[t] * c.u[t]) + e.least);
    }
    for (size_t s = 0; s < of_taps.size(); ++s) {
      mechanism::Add(tolerance.kernel, {d, static_cast<int64_t>(s)}, of_taps[s] + e.least);
    }
  });
  scanning::RoundSums(in.kernel, expected.kernel, tolerance.kernel);
  scanning::RoundSums(in.D, expected.D, tolerance.D);
}

scanning::Mechanism MechanismOf() {
  return scanning::Bound<Structs, Options>(
      "long_convolution", DefinitionOf({}), {},
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS_WITHOUT_STEP, &Tolerance, &BackwardTolerance});
}

// D = Hq D channels, T = Tq tokens and taps.
Case MakeCase(const CaseRequest& request) {
  scanning::Choice choice;
  const mechanism::Words words(request.variant);
  if (const auto number = words.Number("taps")) choice.taps = static_cast<int64_t>(*number);
  return scanning::MakeCase(MechanismOf(), request, choice);
}

}  // namespace

OpEntry Entry() {
  return scanning::EntryOf(MechanismOf(),
                           {.family = "ssm",
                            .variants = {"taps=7", "taps=100", "lengths=62", "reverse", "strided"},
                            .flops = "15 (log2 Tq + 2) per token and channel, backward 25 (log2 Tq + 2); Hq D channels",
                            .bytes = "(2 B + 1) Tq Hq D size",
                            .state = "none",
                            .make_case = &MakeCase});
}

}  // namespace heed::long_convolution
