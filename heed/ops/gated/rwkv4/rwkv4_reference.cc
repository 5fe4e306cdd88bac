// RWKV-4 as it is defined, one token of one channel: everything that it is.
//
//   o_t = (num_{t-1} + exp(u + k_t - max_{t-1}) v_t) / (den_{t-1} + exp(u + k_t - max_{t-1}))
//   max_t = max(max_{t-1} + w, k_t)                                       a constant, without a gradient
//   num_t = exp(max_{t-1} + w - max_t) num_{t-1} + exp(k_t - max_t) v_t
//   den_t = exp(max_{t-1} + w - max_t) den_{t-1} + exp(k_t - max_t)
//
// with w = min(log_decay, 0).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "heed/mechanism/reference/readable_reference_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"

namespace heed::rwkv4 {
namespace {

using mechanism::Array;
using mechanism::ValueOf;

struct Token {
  static constexpr mechanism::ReadableForm kForm = {.heads = 'C', .shared_heads = 0, .o = "BTC"};

  // All arrays have one element.
  template <class Number>
  void operator()(const Array<Number>& k, const Array<Number>& v, const Array<Number>& log_decay,
                  const Array<Number>& u, Array<Number>& num, Array<Number>& den, Array<Number>& max,
                  Array<Number>& o) const {
    using std::exp;
    // A positive log decay counts as 0, and has the gradient of 0.
    const Number w = log_decay[0] > 0 ? log_decay[0] - ValueOf(log_decay[0]) : log_decay[0];
    const double before = ValueOf(max[0]), now = std::max(before + ValueOf(w), ValueOf(k[0]));
    // Numerator and denominator of o are relative to the larger of their exponents.
    const double largest = std::max(before, ValueOf(u[0] + k[0])), past = std::exp(before - largest);
    const Number own = exp(u[0] + k[0] - largest);
    o[0] = (past * num[0] + own * v[0]) / (past * den[0] + own);
    const Number a = exp(w - (now - before)), b = exp(k[0] - now);
    num[0] = a * num[0] + b * v[0];
    den[0] = a * den[0] + b;
    max[0] = now;
  }
};

Token TokenOf(const Inputs&, const Options&) { return {}; }

}  // namespace

HEED_DEFINE_REFERENCES

// Tolerances, a channel at a time.
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Doubles;
using mechanism::Put;
using recurrent::Epsilon;
using recurrent::EpsilonOf;
using recurrent::StoredIn;

constexpr double kNothing = -1e38f;  // an f32 value in every dtype

// One channel of one sequence, with sums relative to the exponential of one number for all tokens; with `magnitudes`,
// sums of absolute values.
struct Channel {
  int64_t sequence = 0, batch = 0, channel = 0;
  std::vector<int64_t> tokens;  // in the order of processing
  double w = 0, u = 0;
  Doubles k, v;
  double num = 0, den = 0, max = kNothing;  // initial state
  double last_max = kNothing;               // max of the final state
  double common = 0;                        // the number that sums are relative to
  double largest = 0;                       // largest magnitude of a maximum

  double Weight(double exponent) const { return std::exp(exponent - common); }
  double Decay() const { return std::exp(w); }
};

template <class F>
void ForEachChannel(const Inputs& in, const Options& options, const F& f) {
  const auto ranges = mechanism::SequencesOf(options, in.k.size(0), in.k.size(1));
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (int64_t channel = 0; channel < in.k.size(2); ++channel) {
      Channel c;
      c.sequence = static_cast<int64_t>(i);
      c.batch = ranges[i].batch;
      c.channel = channel;
      for (int64_t t = ranges[i].begin; t < ranges[i].end; ++t) c.tokens.push_back(t);
      if (options.reverse) std::reverse(c.tokens.begin(), c.tokens.end());
      c.w = std::min(At(in.log_decay, {channel}), 0.0);
      c.u = At(in.u, {channel});
      if (in.initial.num.present()) c.num = At(in.initial.num, {c.sequence, channel});
      if (in.initial.den.present()) c.den = At(in.initial.den, {c.sequence, channel});
      if (in.initial.max.present()) c.max = At(in.initial.max, {c.sequence, channel});
      c.last_max = c.max;
      c.common = c.max;
      for (const int64_t t : c.tokens) {
        c.k.push_back(At(in.k, {c.batch, t, channel}));
        c.v.push_back(At(in.v, {c.batch, t, channel}));
        c.last_max = std::max(c.last_max + c.w, c.k.back());
        c.common = std::max({c.common, c.k.back(), c.u + c.k.back()});
        c.largest = std::max(c.largest, std::abs(c.last_max));
      }
      f(c);
    }
  }
}

// The sums before each token, relative to exp(common), and its output.
struct Pass {
  Doubles num, den, o;
  double last_num = 0, last_den = 0;
};

Pass Run(const Channel& c, bool magnitudes) {
  const auto size = [&](double x) { return magnitudes ? std::abs(x) : x; };
  Pass pass;
  double num = size(c.num) * c.Weight(c.max), den = size(c.den) * c.Weight(c.max);
  for (size_t t = 0; t < c.k.size(); ++t) {
    const double token = c.Weight(c.u + c.k[t]), written = c.Weight(c.k[t]);
    pass.num.push_back(num);
    pass.den.push_back(den);
    pass.o.push_back((num + token * size(c.v[t])) / (den + token));
    num = c.Decay() * num + written * size(c.v[t]);
    den = c.Decay() * den + written;
  }
  pass.last_num = num;
  pass.last_den = den;
  return pass;
}

// Gradients of a channel; those of num and den as they are given.
struct ChannelGradients {
  Doubles k, v;
  double w = 0, u = 0, num = 0, den = 0;
};

ChannelGradients RunBackward(const Channel& c, const Pass& pass, const Doubles& d_o, double d_num, double d_den,
                             bool magnitudes) {
  const auto size = [&](double x) { return magnitudes ? std::abs(x) : x; };
  const double minus = magnitudes ? 1 : -1;
  ChannelGradients g;
  g.k.assign(c.k.size(), 0.0);
  g.v = g.k;
  // Final states are relative to their own maximum.
  double n = size(d_num) * std::exp(c.common - c.last_max);
  double d = size(d_den) * std::exp(c.common - c.last_max);
  if (c.k.empty()) n = d = 0;  // without tokens the caller copies the state
  for (size_t t = c.k.size(); t-- > 0;) {
    const double token = c.Weight(c.u + c.k[t]), written = c.Weight(c.k[t]), v = size(c.v[t]);
    g.v[t] += written * n;
    g.k[t] += written * (v * n + d);
    n *= c.Decay();
    d *= c.Decay();
    g.w += n * pass.num[t] + d * pass.den[t];
    const double e = size(d_o[t]) / (pass.den[t] + token);
    const double of_weight = token * e * (v + minus * pass.o[t]);
    g.v[t] += token * e;
    g.k[t] += of_weight;
    g.u += of_weight;
    n += e;
    d += minus * e * pass.o[t];
  }
  g.num = n * c.Weight(c.max);
  g.den = d * c.Weight(c.max);
  if (c.k.empty()) {
    g.num = size(d_num);
    g.den = size(d_den);
  }
  return g;
}

Doubles GradientsOfO(const BackwardInputs& in, const Channel& c) {
  Doubles d_o;
  for (const int64_t t : c.tokens) d_o.push_back(At(in.d_o, {c.batch, t, c.channel}));
  return d_o;
}

double GradientOf(const ConstTensorView& t, const Channel& c) {
  return t.present() ? At(t, {c.sequence, c.channel}) : 0;
}

// Rounding. A sum of positive weights has an error of one rounding per token, and the quotient o the errors of both
// sums; num has an error relative to the magnitudes of its terms. The rounding of a difference x of exponents is x e^-x
// of a rounding. max has an error of half a rounding per token, to which num and den are relative.
double RelativeError(const Epsilon& e, const Channel& c) {
  return e.chain * std::sqrt(static_cast<double>(c.k.size()) + 1) + 4 * e.base;
}

double ErrorOfMaximum(const Epsilon& e, const Channel& c) {
  const double unit = e.base / 8;
  return unit * (c.largest + std::abs(c.w)) * static_cast<double>(c.k.size() + 1);
}

void Rounded(double value, double error, const Epsilon& e, const TensorView& to, mechanism::Index index) {
  Put(to, index, error + std::abs(value) * e.output + e.subnormal + e.underflow);
}

}  // namespace

void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance) {
  const Epsilon e = EpsilonOf(in.k.dtype());
  mechanism::Clear(tolerance.o);
  ForEachChannel(in, options, [&](const Channel& c) {
    const Pass sizes = Run(c, true);
    const double relative = RelativeError(e, c), of_max = ErrorOfMaximum(e, c);
    for (size_t t = 0; t < c.tokens.size(); ++t) {
      const double value = At(expected.o, {c.batch, c.tokens[t], c.channel});
      Rounded(value, 2 * relative * sizes.o[t], e, tolerance.o, {c.batch, c.tokens[t], c.channel});
    }
    const double factor = c.k.empty() ? 1 : std::exp(c.common - c.last_max);
    const double relative_state = relative + of_max;
    Put(tolerance.final.num, {c.sequence, c.channel},
        c.k.empty() ? 0 : relative_state * sizes.last_num * factor + e.underflow);
    Put(tolerance.final.den, {c.sequence, c.channel},
        c.k.empty() ? 0 : relative_state * sizes.last_den * factor + e.underflow);
    Put(tolerance.final.max, {c.sequence, c.channel}, of_max);
  });
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  const Epsilon e = EpsilonOf(in.k.dtype());
  for (const TensorView* t : {&tolerance.k, &tolerance.v, &tolerance.log_decay, &tolerance.u}) {
    mechanism::Clear(*t);
  }
  ForEachChannel(in, options, [&](const Channel& c) {
    const ChannelGradients sizes = RunBackward(c, Run(c, true), GradientsOfO(in, c), GradientOf(in.d_final.num, c),
                                               GradientOf(in.d_final.den, c), true);
    const bool of_states = in.d_final.num.present() || in.d_final.den.present();
    const double relative = 4 * RelativeError(e, c) + (of_states ? ErrorOfMaximum(e, c) : 0);
    for (size_t t = 0; t < c.tokens.size(); ++t) {
      const auto rounded = [&](const TensorView& value, double size, const TensorView& to) {
        if (!to.present()) return;
        const double x = At(value, {c.batch, c.tokens[t], c.channel});
        Rounded(x, relative * size, e, to, {c.batch, c.tokens[t], c.channel});
      };
      rounded(expected.k, sizes.k[t], tolerance.k);
      rounded(expected.v, sizes.v[t], tolerance.v);
    }
    const auto constant = [&](const ConstTensorView& input, const TensorView& value, double size,
                              const TensorView& to) {
      if (!to.present()) return;
      const Epsilon of = StoredIn(input.dtype(), in.k.dtype());
      const double rounding = std::abs(At(value, {c.channel})) * of.output + of.subnormal;
      Add(to, {c.channel}, relative * size + rounding + e.underflow);
    };
    constant(in.log_decay, expected.log_decay, sizes.w, tolerance.log_decay);
    constant(in.u, expected.u, sizes.u, tolerance.u);
    Put(tolerance.initial.num, {c.sequence, c.channel}, relative * sizes.num + e.underflow);
    Put(tolerance.initial.den, {c.sequence, c.channel}, relative * sizes.den + e.underflow);
  });
}

}  // namespace heed::rwkv4
