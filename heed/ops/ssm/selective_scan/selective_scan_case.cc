// The selective scan in the harness.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/ops/ssm/selective_scan/selective_scan_case.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

namespace heed::selective_scan {
namespace {

using mechanism::Add;
using mechanism::At;
using scanning::Doubles;
using scanning::Epsilon;
using scanning::EpsilonOf;
using scanning::Stored;

// One channel of a sequence, with all intermediate values.
struct Channel {
  scanning::ChannelPlace place;
  int64_t N = 0, group = 0;
  bool gated = false, softplus = false;
  double D = 0;
  Doubles A;                  // [N]
  Doubles u, z, raw, s;       // [T]; raw: delta + delta_bias
  std::vector<Doubles> B, C;  // [T][N]
  std::vector<Doubles> a, h;  // [T][N] decays, [T + 1][N] states before and after tokens
  Doubles y, o;               // [T]

  int64_t T() const { return static_cast<int64_t>(u.size()); }
};

double WeightAt(const ConstTensorView& t, std::span<const int64_t> index) {
  int64_t at = 0;
  for (size_t axis = 0; axis < index.size(); ++axis) {
    at += index[axis] * t.stride(static_cast<int>(axis));
  }
  return LoadAsDouble(t.dtype(), t.data(), at);
}

int64_t NumGroups(const Inputs& in) {
  for (const ConstTensorView* t : {&in.B, &in.C}) {
    if (t->rank() == 4) return t->size(1);
  }
  return 1;
}

void Run(Channel& c) {
  for (size_t t = 0; t < c.u.size(); ++t) {
    const double s = c.softplus ? scanning::Softplus(c.raw[t]) : c.raw[t];
    Doubles a, h;
    a.reserve(c.A.size());
    h.reserve(c.A.size());
    double y = c.D * c.u[t];
    for (size_t n = 0; n < c.A.size(); ++n) {
      a.push_back(std::exp(s * c.A[n]));
      h.push_back(a[n] * c.h[t][n] + s * c.u[t] * c.B[t][n]);
      y += c.C[t][n] * h[n];
    }
    c.s.push_back(s);
    c.a.push_back(std::move(a));
    c.h.push_back(std::move(h));
    c.y.push_back(y);
    c.o.push_back(c.gated ? y * c.z[t] * scanning::Sigmoid(c.z[t]) : y);
  }
}

// The index of an element of B or C, or of their gradients, at a token.
struct WeightPlace {
  std::array<int64_t, 4> axes;
  size_t rank;

  operator std::span<const int64_t>() const { return {axes.data(), rank}; }  // NOLINT: it is an index
};

WeightPlace WeightIndex(const ConstTensorView& weights, const Channel& c, int64_t t, int64_t n) {
  const int64_t token = c.place.tokens[static_cast<size_t>(t)];
  if (weights.rank() == 2) return {{c.place.channel, n}, 2};
  if (weights.rank() == 3) return {{c.place.batch, n, token}, 3};
  return {{c.place.batch, c.group, n, token}, 4};
}

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const Channel&)>& f) {
  const int64_t D = in.u.size(1), groups = NumGroups(in);
  for (const auto& place : scanning::PlacesOf(in.u.size(0), in.u.size(2), D, options)) {
    Channel c;
    const int64_t b = place.batch, d = place.channel;
    c.place = place;
    c.N = in.A.size(1);
    c.group = d / (D / groups);
    c.gated = in.z.present();
    c.softplus = options.delta_softplus;
    c.D = in.D.present() ? At(in.D, {d}) : 0;
    const double bias = in.delta_bias.present() ? At(in.delta_bias, {d}) : 0;
    c.h.emplace_back();
    for (int64_t n = 0; n < c.N; ++n) {
      c.A.push_back(At(in.A, {d, n}));
      c.h[0].push_back(in.initial.S.present() ? At(in.initial.S, {place.sequence, d, n}) : 0);
    }
    for (size_t t = 0; t < place.tokens.size(); ++t) {
      const int64_t token = place.tokens[t];
      c.u.push_back(At(in.u, {b, d, token}));
      c.raw.push_back(At(in.delta, {b, d, token}) + bias);
      if (c.gated) c.z.push_back(At(in.z, {b, d, token}));
      for (const auto& [weights, rows] : {std::pair(&in.B, &c.B), {&in.C, &c.C}}) {
        rows->emplace_back().reserve(static_cast<size_t>(c.N));
        for (int64_t n = 0; n < c.N; ++n) {
          const auto index = WeightIndex(*weights, c, static_cast<int64_t>(t), n);
          rows->back().push_back(WeightAt(*weights, index));
        }
      }
    }
    Run(c);
    f(c);
  }
}

// The part of the gradients that one channel contributes.
struct ChannelGradients {
  std::vector<Doubles> p;                         // [T + 1][N]: gradient of h before the contribution of y_t; p[T] is
                                                  // given
  std::vector<Doubles> q;                         // [T][N]: gradient of h after it
  Doubles d_o, dy, of_input, du, ds, ddelta, dz;  // [T]; of_input: <p, B>
};

ChannelGradients GradientsOf(const BackwardInputs& in, const Channel& c) {
  ChannelGradients g;
  const auto T = static_cast<size_t>(c.T()), N = static_cast<size_t>(c.N);
  for (Doubles* row : {&g.d_o, &g.dy, &g.of_input, &g.du, &g.ds, &g.ddelta, &g.dz}) {
    row->assign(T, 0.0);
  }
  g.q.assign(T, Doubles(N));
  g.p.assign(T + 1, Doubles(N));
  for (size_t n = 0; n < N && in.d_final.S.present(); ++n) {
    g.p[T][n] = At(in.d_final.S, {c.place.sequence, c.place.channel, static_cast<int64_t>(n)});
  }
  for (size_t t = T; t-- > 0;) {
    const double d_o = At(in.d_o, {c.place.batch, c.place.channel, c.place.tokens[t]});
    g.d_o[t] = g.dy[t] = d_o;
    if (c.gated) {
      const double z = c.z[t], sigmoid = scanning::Sigmoid(z);
      g.dy[t] = d_o * z * sigmoid;
      g.dz[t] = d_o * c.y[t] * sigmoid * (1 + z * (1 - sigmoid));
    }
    for (size_t n = 0; n < N; ++n) {
      g.q[t][n] = g.p[t + 1][n] + g.dy[t] * c.C[t][n];
      g.of_input[t] += g.q[t][n] * c.B[t][n];
      g.p[t][n] = c.a[t][n] * g.q[t][n];
      g.ds[t] += g.p[t][n] * c.h[t][n] * c.A[n];
    }
    g.du[t] = c.s[t] * g.of_input[t] + c.D * g.dy[t];
    g.ds[t] += c.u[t] * g.of_input[t];
    g.ddelta[t] = c.softplus ? g.ds[t] * scanning::Sigmoid(c.raw[t]) : g.ds[t];
  }
  return g;
}

// Bounds the rounding error of a channel, to first order in the unit roundoff u, as a sum of worst cases:
//
//   s      delta + bias is rounded once, which softplus' <= 1 does not amplify; softplus has an error of 16 u (an
//          exponential of 3 ulp, a quotient of 1, a series of 9 terms), an ulp is 2 u
//   a      three roundings of its exponent s A log2 e and the error of s; the fraction 2^r - 1, |r| <= 1/2, is at most
//          .42 with an error of 6 u, a h is rounded twice
//   h      the error of a h, two roundings of s u B and the error of s, and one sum
//   y      a chain of N + 1 products, which targets without FMA round on their own
//   silu   16 u of its value, and of each term of its derivative
//
// Backward, q = p + dy C is rounded twice at most, p = a q has the errors of a. Sums over 128 tokens are in f32, and
// sums of these in f64; dB and dC are sums over 4 vectors, lanes of at least 2, and blocks of at least 8 channels.
struct ChannelErrors {
  Doubles s, a, b, y;            // [T]; a and b relative, for all states together: largest A
  std::vector<Doubles> kept, h;  // [T][N] for a h_{t-1}, [T + 1][N] for h
};

// The error of a h relative to it, from its factor a.
double DecayError(const Channel& c, size_t t, size_t n, double of_s, double u) {
  const double x = std::abs(c.s[t] * c.A[n]);
  const double relative_s = c.s[t] == 0 ? 0 : of_s / std::abs(c.s[t]);
  return x * (3 * u + relative_s) + 6 * u * std::min(x, 1.0) + 2 * u;
}

ChannelErrors ErrorsOf(const Channel& c, double u) {
  ChannelErrors e;
  const auto N = static_cast<size_t>(c.N);
  e.h.emplace_back(N, 0.0);
  for (size_t t = 0; t < c.u.size(); ++t) {
    const double of_raw = u * std::abs(c.raw[t]);
    const double of_s = c.softplus ? of_raw * scanning::Sigmoid(c.raw[t]) + 16 * u * c.s[t] : of_raw;
    const double relative_s = c.s[t] == 0 ? 0 : of_s / std::abs(c.s[t]);
    double y = std::abs(c.D * c.u[t]), error = 0;
    e.s.push_back(of_s);
    e.kept.emplace_back();
    e.h.emplace_back();
    for (size_t n = 0; n < N; ++n) {
      const double kept = std::abs(c.a[t][n] * c.h[t][n]);
      const double written = std::abs(c.s[t] * c.u[t] * c.B[t][n]);
      e.kept[t].push_back(c.a[t][n] * e.h[t][n] + kept * DecayError(c, t, n, of_s, u));
      e.h[t + 1].push_back(e.kept[t][n] + written * (relative_s + 2 * u) + u * std::abs(c.h[t + 1][n]));
      y += std::abs(c.C[t][n] * c.h[t + 1][n]);
      error += std::abs(c.C[t][n]) * e.h[t + 1][n];
    }
    e.y.push_back(error + (static_cast<double>(N) + 3) * u * y);
  }
  return e;
}

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  mechanism::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const Channel& c) {
    const ChannelErrors errors = ErrorsOf(c, e.unit);
    for (size_t t = 0; t < c.u.size(); ++t) {
      double error = errors.y[t];
      if (c.gated) {
        const double silu = c.z[t] * scanning::Sigmoid(c.z[t]);
        error = std::abs(silu) * error + 17 * e.unit * std::abs(c.o[t]);
      }
      mechanism::Put(tolerance.o, {c.place.batch, c.place.channel, c.place.tokens[t]}, Stored(c.o[t], error, e));
    }
    const Epsilon state = EpsilonOf(mechanism::StateDType(in.u.dtype()));
    for (int64_t n = 0; n < c.N; ++n) {
      const auto i = static_cast<size_t>(n);
      mechanism::Put(tolerance.final.S, {c.place.sequence, c.place.channel, n},
                     c.u.empty() ? 0 : 1.01 * errors.h.back()[i] + state.least);
    }
  });
}

// Adds to an element of a gradient that several channels contribute to.
void AddAt(const TensorView& t, std::span<const int64_t> index, double value) {
  if (t.present()) SetElement(t, index, GetElement(t, index) + value);
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.u.dtype());
  const double u = e.unit;
  for (const TensorView* t : {&tolerance.u, &tolerance.delta, &tolerance.A, &tolerance.B, &tolerance.C, &tolerance.D,
                              &tolerance.z, &tolerance.delta_bias}) {
    mechanism::Clear(*t);
  }
  const double of_channels = (10 + static_cast<double>(in.u.size(1)) / 8) * u;
  ForEachChannel(in, options, [&](const Channel& c) {
    const ChannelErrors forward = ErrorsOf(c, u);
    const ChannelGradients g = GradientsOf(in, c);
    const auto N = static_cast<size_t>(c.N);
    const int64_t b = c.place.batch, d = c.place.channel;
    const double of_tokens = (131 + static_cast<double>(in.u.dtype() == DType::kF64 ? c.T() / 128 : 1)) * u;
    Doubles of_p(N, 0.0);  // error of the gradient from later tokens
    for (size_t t = c.u.size(); t-- > 0;) {
      const double s = std::abs(c.s[t]), x = std::abs(c.u[t]), of_s = forward.s[t];
      const double dy = std::abs(g.dy[t]), of_dy = c.gated ? 17 * u * dy : 0;
      double input = 0, of_input = 0, rates = 0, of_rates = 0;
      for (size_t n = 0; n < N; ++n) {
        const double q = std::abs(g.q[t][n]), kept = std::abs(c.a[t][n] * c.h[t][n]);
        const double C = std::abs(c.C[t][n]);
        const double of_q = of_p[n] + C * of_dy + u * (q + dy * C);
        const double r = q * kept, of_r = kept * of_q + q * forward.kept[t][n] + u * r;
        input += q * std::abs(c.B[t][n]);
        of_input += of_q * std::abs(c.B[t][n]);
        rates += r * std::abs(c.A[n]);
        of_rates += of_r * std::abs(c.A[n]);
        const auto token = static_cast<int64_t>(t), state = static_cast<int64_t>(n);
        const bool B_is_constant = in.B.rank() == 2, C_is_constant = in.C.rank() == 2;
        const double dB = q * s * x, dC = dy * std::abs(c.h[t + 1][n]);
        AddAt(tolerance.B, WeightIndex(in.B, c, token, state),
              of_q * s * x + q * x * of_s + u * dB + (B_is_constant ? of_tokens : of_channels) * dB + e.least);
        AddAt(tolerance.C, WeightIndex(in.C, c, token, state),
              of_dy * std::abs(c.h[t + 1][n]) + dy * forward.h[t + 1][n] +
                  (C_is_constant ? of_tokens : of_channels) * dC + e.least);
        Add(tolerance.A, {d, state}, s * of_r + r * of_s + of_tokens * r * s + e.least);
        of_p[n] = c.a[t][n] * of_q + c.a[t][n] * q * DecayError(c, t, n, of_s, u);
      }
      const double chain = (static_cast<double>(N) + 6) * u;
      of_input += chain * input;
      of_rates += chain * rates;
      const double of_ds = of_rates + x * of_input + 2 * u * (rates + x * input);
      const double of_du =
          s * of_input + input * of_s + std::abs(c.D) * of_dy + 2 * u * (s * input + std::abs(c.D) * dy);
      double of_ddelta = of_ds;
      if (c.softplus) {
        // 1 - e^-s, and its derivative e^-s.
        const double slope = scanning::Sigmoid(c.raw[t]);
        of_ddelta = slope * of_ds + std::abs(g.ds[t]) * ((1 - slope) * of_s + 10 * u * slope);
      }
      const int64_t token = c.place.tokens[t];
      const auto put = [&](const TensorView& to, const ConstTensorView& like, double value, double error) {
        mechanism::Put(to, {b, d, token}, Stored(value, error, EpsilonOf(like.dtype())));
      };
      put(tolerance.u, in.u, g.du[t], of_du);
      put(tolerance.delta, in.delta, g.ddelta[t], of_ddelta);
      if (c.gated) {
        const double z = c.z[t], sigmoid = scanning::Sigmoid(z);
        const double slope = std::abs(sigmoid * (1 + z * (1 - sigmoid)));
        const double terms = sigmoid + std::abs(z) * sigmoid * (1 - sigmoid);
        put(tolerance.z, in.z, g.dz[t],
            std::abs(g.d_o[t]) * (slope * forward.y[t] + std::abs(c.y[t]) * 18 * u * terms));
      }
      Add(tolerance.D, {d}, x * of_dy + of_tokens * dy * x + e.least);
      Add(tolerance.delta_bias, {d}, of_ddelta + of_tokens * std::abs(g.ddelta[t]) + e.least);
    }
    const Epsilon state = EpsilonOf(mechanism::StateDType(in.u.dtype()));
    for (size_t n = 0; n < N; ++n) {
      mechanism::Put(tolerance.initial.S, {c.place.sequence, d, static_cast<int64_t>(n)},
                     c.u.empty() ? 0 : 1.01 * of_p[n] + state.least);
    }
  });
  scanning::RoundSums(in.A, expected.A, tolerance.A);
  scanning::RoundSums(in.B, expected.B, tolerance.B);
  scanning::RoundSums(in.C, expected.C, tolerance.C);
  scanning::RoundSums(in.D, expected.D, tolerance.D);
  scanning::RoundSums(in.delta_bias, expected.delta_bias, tolerance.delta_bias);
}

// D = Hq D channels, T = Tq tokens, N = 16 states.
Case MakeCase(const CaseRequest& request) {
  Options options;
  scanning::Choice choice;
  choice.absent = {"z", "delta_bias"};
  choice.groups = 0;
  const mechanism::Words words(request.variant);
  if (words.Has("mamba")) {  // as Mamba's block calls it
    options.delta_softplus = true;
    choice.absent.clear();
  }
  if (words.Has("groups")) choice.groups = 2;
  if (words.Has("constant")) choice.constant = {"B", "C"};
  if (const auto number = words.Number("states")) choice.states = static_cast<int64_t>(*number);
  return scanning::MakeCase(MechanismOf(options), request, choice);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Options options;
  options.delta_softplus = seed % 2 == 0;
  return scanning::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

scanning::Mechanism MechanismOf(const Options& options) {
  return scanning::Bound<Structs, Options>(
      "selective_scan", DefinitionOf(options), options,
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance},
      options.delta_softplus ? " softplus" : "");
}

OpEntry Entry() {
  std::vector<std::string> variants = scanning::kVariants;
  variants.insert(variants.end(), {"mamba", "groups", "constant", "states=5"});
  return scanning::EntryOf(MechanismOf({}), {.family = "ssm",
                                             .variants = variants,
                                             .flops = "7 N per token and channel, backward 21 N; Hq D channels, N = 16",
                                             .bytes = "B Tq (3 Hq D + 2 N) size",
                                             .state = "B Hq D N 4",
                                             .make_case = &MakeCase,
                                             .random_case = &RandomCase});
}

}  // namespace heed::selective_scan
