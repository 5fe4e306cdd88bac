// The causal convolution in the harness.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/harness/mechanism/scanning_case.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Clear;
using mechanism::Put;
using scanning::Epsilon;

using Doubles = std::vector<double>;

double Silu(double p) { return p / (1 + std::exp(-p)); }

double SiluSlope(double p) {
  const double s = 1 / (1 + std::exp(-p)), complement = 1 / (1 + std::exp(p));
  return s + p * s * complement;
}

// One channel of a sequence; the state is the first part of its inputs.
struct Channel {
  int64_t sequence, batch, channel;
  std::vector<int64_t> tokens;  // their indices, in the order of processing
  Doubles inputs;               // [W - 1 + tokens], the state first
  Doubles weight;               // [W]
  double bias = 0;
  bool silu = false;

  int64_t W() const { return static_cast<int64_t>(weight.size()); }
  int64_t T() const { return static_cast<int64_t>(tokens.size()); }
  double Input(int64_t t) const { return inputs[static_cast<size_t>(t + W() - 1)]; }  // t >= 1 - W
  double Preactivation(int64_t t) const {
    double p = bias;
    for (int64_t j = 0; j < W(); ++j) p += weight[static_cast<size_t>(j)] * Input(t - (W() - 1) + j);
    return p;
  }
};

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const Channel&)>& f) {
  const int64_t W = in.weight.size(1);
  const auto ranges = mechanism::SequencesOf(options, in.x.size(0), in.x.size(2));
  for (size_t n = 0; n < ranges.size(); ++n) {
    for (int64_t channel = 0; channel < in.x.size(1); ++channel) {
      Channel c;
      c.sequence = static_cast<int64_t>(n);
      c.batch = ranges[n].batch;
      c.channel = channel;
      c.silu = options.activation == Activation::kSilu;
      for (int64_t t = ranges[n].begin; t < ranges[n].end; ++t) c.tokens.push_back(t);
      if (options.reverse) std::reverse(c.tokens.begin(), c.tokens.end());
      for (int64_t i = 0; i < W - 1; ++i) {
        c.inputs.push_back(in.initial.inputs.present() ? At(in.initial.inputs, {c.sequence, channel, i}) : 0);
      }
      for (const int64_t t : c.tokens) c.inputs.push_back(At(in.x, {c.batch, channel, t}));
      for (int64_t j = 0; j < W; ++j) c.weight.push_back(At(in.weight, {channel, j}));
      if (in.bias.present()) c.bias = At(in.bias, {channel});
      f(c);
    }
  }
}

// d_o of the channel's tokens, and d_final [W - 1], zeros if absent.
Doubles GradientsOfO(const BackwardInputs& in, const Channel& c) {
  Doubles d_o;
  for (const int64_t t : c.tokens) d_o.push_back(At(in.d_o, {c.batch, c.channel, t}));
  return d_o;
}
Doubles GradientsOfFinal(const BackwardInputs& in, const Channel& c) {
  Doubles d_final(static_cast<size_t>(c.W() - 1), 0.0);
  for (size_t i = 0; in.d_final.inputs.present() && i < d_final.size(); ++i) {
    d_final[i] = At(in.d_final.inputs, {c.sequence, c.channel, static_cast<int64_t>(i)});
  }
  return d_final;
}

// The tolerance, with u the unit roundoff of the accumulation dtype:
//
//   p      is a chain of W fused products on the bias: (W + 1) u M, M = |b| + sum |w x|
//   silu   that times |silu'| <= 1.1, plus 16 u |y|: an exponential of 3 ulp, a sum, a quotient of
//          1.5 ulp and a product, an ulp being 2 u at most
//   dp     d_o times the error of silu', which is |silu''| <= 0.5 times the error of p plus 16 u of each of its two
//          terms
//   dx     a chain over W products, and their errors: (W + 2) u sum |w dp| + sum |w| e_dp
//   dw     128 tokens in lanes of 2 f64 or 4 f32 at the least: 64 or 32 roundings, 2 for adding halves; groups are
//          added in f64, for f64 tensors one rounding per group
//
// Inputs of 16 bits are widened exactly; results are rounded once more, to 2^-8 or 2^-11, an
// f16 to 2^-25 where it is subnormal. Results below the least normal number may be 0. States are copies, without error.
Epsilon EpsilonOf(DType dtype) {
  Epsilon e = scanning::EpsilonOf(dtype);
  e.least = dtype == DType::kF64 ? 1e-300 : 1e-36;
  return e;
}

constexpr double kSiluUnits = 16;
constexpr double kFloor = 8;  // products that underflow, for inputs of a few units

struct TokenError {
  double p, error;  // the preactivation and its error
};

TokenError PreactivationOf(const Channel& c, int64_t t, const Epsilon& e) {
  double sum = std::abs(c.bias);
  for (int64_t j = 0; j < c.W(); ++j) {
    sum += std::abs(c.weight[static_cast<size_t>(j)] * c.Input(t - (c.W() - 1) + j));
  }
  return {c.Preactivation(t), static_cast<double>(c.W() + 1) * (e.unit * sum + e.least)};
}

void Tolerance(const Inputs& in, const Options& options, const Outputs&, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.x.dtype());
  Clear(tolerance.o);
  Clear(tolerance.final.inputs);
  ForEachChannel(in, options, [&](const Channel& c) {
    for (int64_t t = 0; t < c.T(); ++t) {
      const TokenError at = PreactivationOf(c, t, e);
      const double y = c.silu ? Silu(at.p) : at.p;
      const double error = c.silu ? 1.1 * at.error + kSiluUnits * e.unit * std::abs(y) + kFloor * e.least : at.error;
      Put(tolerance.o, {c.batch, c.channel, c.tokens[static_cast<size_t>(t)]},
          error + e.output * (std::abs(y) + error) + e.subnormal);
    }
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.x.dtype());
  for (const TensorView* t : {&tolerance.x, &tolerance.weight, &tolerance.bias, &tolerance.initial.inputs}) {
    Clear(*t);
  }
  const double lanes = in.x.dtype() == DType::kF64 ? 64 : 32;
  int64_t groups = 0;
  ForEachChannel(in, options, [&](const Channel& c) {
    if (c.channel == 0) groups += c.T() / 128 + 1;
  });
  const double of_sum = (lanes + 3 + (in.x.dtype() == DType::kF64 ? static_cast<double>(groups) : 1)) * e.unit;
  ForEachChannel(in, options, [&](const Channel& c) {
    const Doubles d_o = GradientsOfO(in, c), d_final = GradientsOfFinal(in, c);
    const int64_t W = c.W(), T = c.T();
    const double of_chain = static_cast<double>(W + 2) * e.unit;
    Doubles d_inputs(c.inputs.size(), kFloor * static_cast<double>(W) * e.least);
    for (int64_t i = 0; i < W - 1; ++i) {
      d_inputs[static_cast<size_t>(T + i)] += of_chain * std::abs(d_final[static_cast<size_t>(i)]);
    }
    for (int64_t t = 0; t < T; ++t) {
      double slope = 1, error = 0;
      if (c.silu) {
        const TokenError at = PreactivationOf(c, t, e);
        const double s = 1 / (1 + std::exp(-at.p));
        slope = std::abs(SiluSlope(at.p));
        error = 0.5 * at.error + kSiluUnits * e.unit * (s + std::abs(at.p) * s * (1 - s)) + kFloor * e.least;
      }
      const double size = std::abs(d_o[static_cast<size_t>(t)]);
      const double dp = size * slope;
      const double of_dp = size * error + e.unit * dp + e.least;
      for (int64_t j = 0; j < W; ++j) {
        const double w = std::abs(c.weight[static_cast<size_t>(j)]);
        d_inputs[static_cast<size_t>(t + j)] += w * (of_dp + of_chain * dp);
        Add(tolerance.weight, {c.channel, j}, std::abs(c.Input(t - (W - 1) + j)) * (of_dp + of_sum * dp) + e.least);
      }
      Add(tolerance.bias, {c.channel}, of_dp + of_sum * dp);
    }
    for (int64_t i = 0; i < W - 1; ++i) {
      Put(tolerance.initial.inputs, {c.sequence, c.channel, i}, d_inputs[static_cast<size_t>(i)]);
    }
    for (int64_t t = 0; t < T; ++t) {
      Put(tolerance.x, {c.batch, c.channel, c.tokens[static_cast<size_t>(t)]},
          d_inputs[static_cast<size_t>(W - 1 + t)]);
    }
  });
  const auto round = [](const TensorView& t, const TensorView& value, DType dtype) {
    const Epsilon of = EpsilonOf(dtype);
    for (int64_t i = 0; t.present() && i < t.num_elements(); ++i) {
      double* at = t.as<double>() + i;  // both as generated by the harness
      *at += of.output * (std::abs(value.as<double>()[i]) + *at) + of.subnormal;
    }
  };
  round(tolerance.x, expected.x, in.x.dtype());
  round(tolerance.weight, expected.weight, in.weight.dtype());
  round(tolerance.bias, expected.bias, in.bias.dtype());
}

scanning::Mechanism MechanismOf(const Options& own) {
  return scanning::Bound<Structs, Options>(
      "causal_conv1d", DefinitionOf(own), own,
      mechanism::CaseFunctions<Structs, Options>{HEED_FUNCTIONS, &Tolerance, &BackwardTolerance},
      own.activation == Activation::kSilu ? " silu" : "");
}

// D = Hq D channels, T = Tq tokens.
Case MakeCase(const CaseRequest& request) {
  const mechanism::Words words(request.variant);
  Options options;
  if (words.Has("silu")) options.activation = Activation::kSilu;
  scanning::Choice choice;
  if (words.Has("no_bias")) choice.absent = {"bias"};
  choice.swapped = words.Has("channels_last");
  if (const auto width = words.Number("width")) choice.shifts = static_cast<int64_t>(*width);
  return scanning::MakeCase(MechanismOf(options), request, choice);
}

Case RandomCase(DType dtype, uint64_t seed) {
  Options options;
  if (Random(seed, 1).Chance(0.6)) options.activation = Activation::kSilu;
  return scanning::RandomCase(MechanismOf(options), dtype, seed);
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = scanning::EntryOf(
      MechanismOf({}), {.family = "ssm",
                        .variants = {"silu", "no_bias", "state", "lengths=62", "reverse", "channels_last", "width=3"},
                        .flops = "2 W per token and channel, backward 6 W; Hq D channels, W = 4",
                        .bytes = "2 B Tq Hq D size",
                        .state = "B Hq D (W - 1) 4",
                        .make_case = &MakeCase,
                        .random_case = &RandomCase});
  for (size_t i : {1, 2}) entry.inputs[i].wide = false;  // files have them in x's dtype
  return entry;
}

}  // namespace heed::causal_conv1d
