// HGRN in the harness.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/ops/gated/hgrn/hgrn_internal.h"
#include "heed/harness/mechanism/scanning_case.h"

namespace heed::hgrn {
namespace {

using mechanism::At;
using mechanism::Put;
using scanning::Doubles;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Stored;

// One channel of a sequence, with all intermediate values.
struct Channel {
  scanning::ChannelPlace place;
  Doubles x, g, a;  // [T]: g clamped to at most 0, a = e^g
  Doubles h;        // [T + 1]: states before and after tokens

  size_t T() const { return x.size(); }
};

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const Channel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.x.size(0), in.x.size(1), in.x.size(2), options)) {
    const int64_t b = place.batch, d = place.channel;
    Channel c = {place, {}, {}, {}, {}};
    c.h.push_back(in.initial.S.present() ? At(in.initial.S, {place.sequence, d}) : 0);
    for (const int64_t token : place.tokens) {
      c.x.push_back(At(in.x, {b, token, d}));
      const double g = At(in.log_decay, {b, token, d});
      c.g.push_back(g > 0 ? 0 : g);
      c.a.push_back(std::exp(c.g.back()));
      c.h.push_back(c.a.back() * c.h.back() + c.x.back());
    }
    f(c);
  }
}

struct ChannelGradients {
  Doubles p, q;  // gradient of h: p [T + 1] before the contribution of o_t, with p[T] given; q [T] after it
};

ChannelGradients GradientsOf(const BackwardInputs& in, const Channel& c) {
  const int64_t d = c.place.channel;
  ChannelGradients g = {Doubles(c.T() + 1), Doubles(c.T())};
  g.p[c.T()] = in.d_final.S.present() ? At(in.d_final.S, {c.place.sequence, d}) : 0;
  for (size_t t = c.T(); t-- > 0;) {
    g.q[t] = g.p[t + 1] + At(in.d_o, {c.place.batch, c.place.tokens[t], d});
    g.p[t] = c.a[t] * g.q[t];
  }
  return g;
}

// Bounds the rounding error of a channel, to first order in the unit roundoff u, as a sum of worst cases: the exponent
// g log2 e is rounded twice and its constant once; the fraction 2^r - 1 is at most .42 and has an error of 6 u; a h is
// rounded twice, or once where the decayed and the new term are fused; each sum is rounded once.
double DecayError(double g, double u) {
  const double x = std::abs(g);
  return (std::isinf(x) ? 0 : 3 * u * x) + 6 * u * std::min(x, 1.0) + 2 * u;
}

// The errors of h before and after each token.
Doubles ErrorsOf(const Channel& c, double u) {
  Doubles errors = {0.0};
  for (size_t t = 0; t < c.T(); ++t) {
    errors.push_back(c.a[t] * errors[t] + std::abs(c.a[t] * c.h[t]) * DecayError(c.g[t], u) +
                     u * (std::abs(c.h[t + 1] - c.a[t] * c.h[t]) + std::abs(c.h[t + 1])));
  }
  return errors;
}

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.x.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.x.dtype()));
  mechanism::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const Channel& c) {
    const Doubles errors = ErrorsOf(c, e.unit);
    const int64_t d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      Put(tolerance.o, {c.place.batch, c.place.tokens[t], d}, Stored(c.h[t + 1], errors[t + 1], e));
    }
    Put(tolerance.final.S, {c.place.sequence, d}, c.T() == 0 ? 0 : 1.01 * errors.back() + state.least);
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients&, const Gradients& tolerance) {
  const double u = EpsilonOf(in.x.dtype()).unit;
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.x.dtype()));
  for (const TensorView* t : {&tolerance.x, &tolerance.log_decay}) mechanism::Clear(*t);
  ForEachChannel(in, options, [&](const Channel& c) {
    const Doubles of_h = ErrorsOf(c, u);
    const ChannelGradients g = GradientsOf(in, c);
    const int64_t b = c.place.batch, d = c.place.channel;
    double of_p = 0;
    for (size_t t = c.T(); t-- > 0;) {
      const double of_q = of_p + u * std::abs(g.q[t]);
      of_p = c.a[t] * of_q + std::abs(g.p[t]) * DecayError(c.g[t], u);
      const double dlog = g.p[t] * c.h[t];
      const double of_dlog = of_p * std::abs(c.h[t]) + std::abs(g.p[t]) * of_h[t] + u * std::abs(dlog);
      const int64_t token = c.place.tokens[t];
      Put(tolerance.x, {b, token, d}, Stored(g.q[t], of_q, EpsilonOf(in.x.dtype())));
      Put(tolerance.log_decay, {b, token, d}, Stored(dlog, of_dlog, EpsilonOf(in.log_decay.dtype())));
    }
    Put(tolerance.initial.S, {c.place.sequence, d}, c.T() == 0 ? 0 : 1.01 * of_p + state.least);
  });
}

scanning::Mechanism MechanismOf() {
  return scanning::Bound<Structs, Options>(
      "hgrn", DefinitionOf({}), {},
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance});
}

}  // namespace

// D = Hq D channels, T = Tq tokens.
OpEntry Entry() {
  return scanning::EntryOf(MechanismOf(), {.family = "gated",
                                           .variants = scanning::kVariants,
                                           .flops = "2 per token and channel, backward 6; Hq D channels",
                                           .bytes = "3 B Tq Hq D size",
                                           .state = "B Hq D 4"});
}

}  // namespace heed::hgrn
