// RG-LRU in the harness.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "heed/harness/mechanism/scanning_case.h"

namespace heed::rg_lru {
namespace {

using mechanism::At;
using mechanism::Put;
using scanning::Doubles;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Sigmoid;
using scanning::Stored;

// One channel of a sequence, with all intermediate values.
struct Channel {
  scanning::ChannelPlace place;
  double c = 0, lambda = 0, rate = 0;  // rate: -c softplus(lambda)
  bool begins = false;                 // no initial state: the first root is 1
  Doubles x, input, recurrence;        // [T]: gates after their sigmoids
  Doubles raw_input, raw_recurrence;   // gates before their sigmoids
  Doubles log_a, a, root, written;     // [T]
  Doubles h;                           // [T + 1]: states before and after tokens

  size_t T() const { return x.size(); }
  bool is_first(size_t t) const { return begins && t == 0; }
};

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const Channel&)>& f) {
  for (const auto& place : scanning::PlacesOf(in.x.size(0), in.x.size(1), in.x.size(2), options)) {
    const int64_t b = place.batch, d = place.channel;
    Channel c;
    c.place = place;
    c.c = options.c;
    c.lambda = At(in.a, {d});
    c.rate = -c.c * scanning::Softplus(c.lambda);
    c.begins = !in.initial.S.present();
    c.h.push_back(c.begins ? 0 : At(in.initial.S, {place.sequence, d}));
    for (size_t t = 0; t < place.tokens.size(); ++t) {
      const int64_t token = place.tokens[t];
      c.x.push_back(At(in.x, {b, token, d}));
      c.raw_input.push_back(At(in.input_gate, {b, token, d}));
      c.raw_recurrence.push_back(At(in.recurrence_gate, {b, token, d}));
      c.input.push_back(Sigmoid(c.raw_input[t]));
      c.recurrence.push_back(Sigmoid(c.raw_recurrence[t]));
      c.log_a.push_back(c.rate * c.recurrence[t]);
      c.a.push_back(std::exp(c.log_a[t]));
      c.root.push_back(c.is_first(t) ? 1 : std::sqrt(-std::expm1(2 * c.log_a[t])));
      c.written.push_back(c.root[t] * c.input[t] * c.x[t]);
      c.h.push_back(c.a[t] * c.h[t] + c.written[t]);
    }
    f(c);
  }
}

struct ChannelGradients {
  Doubles p, q;                             // gradient of h: p [T + 1] before the contribution of o_t, with p[T] given;
                                            // q [T] after it
  Doubles slope;                            // [T]: a^2 / root, the derivative of the root, at most 1000
  Doubles dx, dinput, drecurrence, dlog_a;  // [T]
};

ChannelGradients GradientsOf(const BackwardInputs& in, const Channel& c) {
  constexpr double kMostSlope = 1000;  // limit of the derivative of the square root
  const int64_t d = c.place.channel;
  const size_t T = c.T();
  ChannelGradients g;
  g.p.assign(T + 1, 0.0);
  for (Doubles* row : {&g.q, &g.slope, &g.dx, &g.dinput, &g.drecurrence, &g.dlog_a}) {
    row->assign(T, 0.0);
  }
  if (in.d_final.S.present()) g.p[T] = At(in.d_final.S, {c.place.sequence, d});
  for (size_t t = T; t-- > 0;) {
    g.q[t] = g.p[t + 1] + At(in.d_o, {c.place.batch, c.place.tokens[t], d});
    g.p[t] = c.a[t] * g.q[t];
    const double gated = c.input[t] * c.x[t];
    g.dlog_a[t] = g.p[t] * c.h[t];
    if (!c.is_first(t)) {
      const double of_sqrt = std::fmin(1 / (2 * c.root[t]), kMostSlope);
      g.slope[t] = 2 * c.a[t] * c.a[t] * of_sqrt;
      g.dlog_a[t] -= g.q[t] * gated * g.slope[t];
    }
    g.dx[t] = g.q[t] * c.root[t] * c.input[t];
    g.dinput[t] = g.q[t] * c.root[t] * c.x[t] * c.input[t] * Sigmoid(-c.raw_input[t]);
    g.drecurrence[t] = g.dlog_a[t] * c.rate * c.recurrence[t] * Sigmoid(-c.raw_recurrence[t]);
  }
  return g;
}

// Bounds the rounding error of a channel, to first order in the unit roundoff u, as a sum of worst cases. All errors
// except those of h and its gradient are relative:
//
//   sigmoid, softplus  16 u (an exponential of 3 ulp, a quotient of 1, a series of 9 terms), an ulp is 2 u
//   x = -log a         35 u: a sigmoid, a softplus, c and two products
//   a                  its exponent in base 2 has 3 u more; the fraction 2^r - 1 is at most .42 with an error of 6 u; a
//                      h is rounded twice
//   1 - a              the error of a from x, which is x a <= 1 - a, and from the fraction, min(x, 1) <= 1.6 (1 - a);
//                      and 2 u, since the result is exact without a fraction
//   root               half of the error of (1 - a) (1 + a), and one rounding
constexpr double kSigmoid = 16, kRate = 18, kLog = kSigmoid + kRate + 1;

struct TokenErrors {
  double decay, root, written, slope;
};

TokenErrors ErrorsOf(const Channel& c, size_t t, double u) {
  TokenErrors e = {};
  const double x = -c.log_a[t], a = c.a[t];
  const double by_exponent = x * (3 + kLog) * u, by_fraction = 6 * u * std::min(x, 1.0);
  e.decay = by_exponent + by_fraction + 2 * u;
  const double less = -std::expm1(c.log_a[t]);  // 1 - a
  const double of_less = less > 0 ? (a * by_exponent + by_fraction) / less + 2 * u : 0;
  const double of_square = of_less + (a * e.decay) / (1 + a) + 2 * u;
  e.root = c.is_first(t) ? 0 : of_square / 2 + u;
  e.written = e.root + (kSigmoid + 3) * u;  // and once in the sum with the decayed state
  e.slope = 2 * e.decay + of_square / 2 + 3 * u;
  return e;
}

// The errors of h before and after each token.
Doubles StateErrorsOf(const Channel& c, double u) {
  Doubles errors = {0.0};
  for (size_t t = 0; t < c.T(); ++t) {
    const TokenErrors e = ErrorsOf(c, t, u);
    errors.push_back(c.a[t] * errors[t] + std::abs(c.a[t] * c.h[t]) * e.decay + std::abs(c.written[t]) * e.written +
                     u * std::abs(c.h[t + 1]));
  }
  return errors;
}

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.x.dtype());
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.x.dtype()));
  mechanism::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const Channel& c) {
    const Doubles errors = StateErrorsOf(c, e.unit);
    const int64_t d = c.place.channel;
    for (size_t t = 0; t < c.T(); ++t) {
      Put(tolerance.o, {c.place.batch, c.place.tokens[t], d}, Stored(c.h[t + 1], errors[t + 1], e));
    }
    Put(tolerance.final.S, {c.place.sequence, d}, c.T() == 0 ? 0 : 1.01 * errors.back() + state.least);
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon own = EpsilonOf(in.x.dtype());
  const double u = own.unit;
  const Epsilon state = EpsilonOf(mechanism::StateDType(in.x.dtype()));
  for (const TensorView* t : {&tolerance.x, &tolerance.input_gate, &tolerance.recurrence_gate, &tolerance.a}) {
    mechanism::Clear(*t);
  }
  ForEachChannel(in, options, [&](const Channel& c) {
    const Doubles of_h = StateErrorsOf(c, u);
    const ChannelGradients g = GradientsOf(in, c);
    const int64_t b = c.place.batch, d = c.place.channel;
    // Sums over 128 tokens, and sums of those.
    const double of_sum = (128 + static_cast<double>(c.T()) / 128) * u;
    double of_p = 0;
    for (size_t t = c.T(); t-- > 0;) {
      const TokenErrors e = ErrorsOf(c, t, u);
      const double q = std::abs(g.q[t]), p = std::abs(g.p[t]);
      const double of_q = of_p + u * q;
      of_p = c.a[t] * of_q + p * e.decay;
      const double kept = p * std::abs(c.h[t]);
      const double per_q = std::abs(c.input[t] * c.x[t]) * g.slope[t];
      const double of_dlog = of_p * std::abs(c.h[t]) + p * of_h[t] + u * kept + per_q * of_q +
                             per_q * q * (e.slope + (kSigmoid + 2) * u) + u * std::abs(g.dlog_a[t]);
      const double of_x = c.root[t] * c.input[t], complement = Sigmoid(-c.raw_input[t]);
      const int64_t token = c.place.tokens[t];
      const auto put = [&](const TensorView& to, const ConstTensorView& like, double value, double error) {
        Put(to, {b, token, d}, Stored(value, error, EpsilonOf(like.dtype())));
      };
      const double of_gated = of_q / (q > 0 ? q : 1) + e.root;
      put(tolerance.x, in.x, g.dx[t], q > 0 ? std::abs(g.dx[t]) * (of_gated + (kSigmoid + 2) * u) : of_q * of_x);
      put(tolerance.input_gate, in.input_gate, g.dinput[t],
          q > 0 ? std::abs(g.dinput[t]) * (of_gated + (2 * kSigmoid + 4) * u)
                : of_q * of_x * std::abs(c.x[t]) * complement);
      const double per_log = std::abs(c.rate) * c.recurrence[t] * Sigmoid(-c.raw_recurrence[t]);
      put(tolerance.recurrence_gate, in.recurrence_gate, g.drecurrence[t],
          per_log * (of_dlog + std::abs(g.dlog_a[t]) * (kRate + 2 * kSigmoid + 4) * u));
      const double per_a = c.c * c.recurrence[t] * Sigmoid(c.lambda);
      mechanism::Add(tolerance.a, {d},
                     per_a * (of_dlog + std::abs(g.dlog_a[t]) * (of_sum + (2 * kSigmoid + 4) * u)) + own.least);
    }
    Put(tolerance.initial.S, {c.place.sequence, d}, c.T() == 0 ? 0 : 1.01 * of_p + state.least);
  });
  scanning::RoundSums(in.a, expected.a, tolerance.a);
}

scanning::Mechanism MechanismOf(const Options& options) {
  return scanning::Bound<Structs, Options>(
      "rg_lru", DefinitionOf(options), options,
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance},
      options.c == Options().c ? "" : " c=" + std::to_string(options.c));
}

Case RandomCase(DType dtype, uint64_t seed) {
  Options options;
  // Decays so close to 1 that the limit of the root's derivative applies.
  if (seed % 3 == 0) options.c = std::pow(10.0, -static_cast<double>(1 + seed / 3 % 8));
  return scanning::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

// D = Hq D channels, T = Tq tokens.
OpEntry Entry() {
  return scanning::EntryOf(MechanismOf({}), {.family = "gated",
                                             .variants = {"state", "lengths=62", "reverse", "strided"},
                                             .flops = "30 per token and channel, backward 90; Hq D channels",
                                             .bytes = "4 B Tq Hq D size",
                                             .state = "B Hq D 4",
                                             .random_case = &RandomCase});
}

}  // namespace heed::rg_lru
