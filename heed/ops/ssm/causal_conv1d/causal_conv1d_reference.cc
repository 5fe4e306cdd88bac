// The reference of the causal convolution, in double.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_reference_internal.h"

namespace heed::causal_conv1d {

using mechanism::Add;
using mechanism::At;
using mechanism::Clear;
using mechanism::Put;

double Silu(double p) { return p / (1 + std::exp(-p)); }

double SiluSlope(double p) {
  const double s = 1 / (1 + std::exp(-p)), complement = 1 / (1 + std::exp(p));
  return s + p * s * complement;
}

double ReferenceChannel::Preactivation(int64_t t) const {
  double p = bias;
  for (int64_t j = 0; j < W(); ++j) {
    p += weight[static_cast<size_t>(j)] * Input(t - (W() - 1) + j);
  }
  return p;
}

void ForEachChannel(const Inputs& in, const Options& options, const std::function<void(const ReferenceChannel&)>& f) {
  const int64_t W = in.weight.size(1);
  const auto ranges = mechanism::SequencesOf(options, in.x.size(0), in.x.size(2));
  for (size_t n = 0; n < ranges.size(); ++n) {
    for (int64_t channel = 0; channel < in.x.size(1); ++channel) {
      ReferenceChannel c;
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

Doubles GradientsOfO(const BackwardInputs& in, const ReferenceChannel& c) {
  Doubles d_o;
  for (const int64_t t : c.tokens) d_o.push_back(At(in.d_o, {c.batch, c.channel, t}));
  return d_o;
}

Doubles GradientsOfFinal(const BackwardInputs& in, const ReferenceChannel& c) {
  Doubles d_final(static_cast<size_t>(c.W() - 1), 0.0);
  for (size_t i = 0; in.d_final.inputs.present() && i < d_final.size(); ++i) {
    d_final[i] = At(in.d_final.inputs, {c.sequence, c.channel, static_cast<int64_t>(i)});
  }
  return d_final;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  Clear(out.o);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    for (int64_t t = 0; t < c.T(); ++t) {
      const double p = c.Preactivation(t);
      Put(out.o, {c.batch, c.channel, c.tokens[static_cast<size_t>(t)]}, c.silu ? Silu(p) : p);
    }
    for (int64_t i = 0; i < c.W() - 1; ++i) {
      Put(out.final.inputs, {c.sequence, c.channel, i}, c.Input(c.T() - (c.W() - 1) + i));
    }
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  for (const TensorView* t : {&out.x, &out.weight, &out.bias}) Clear(*t);
  ForEachChannel(in, options, [&](const ReferenceChannel& c) {
    const Doubles d_o = GradientsOfO(in, c), d_final = GradientsOfFinal(in, c);
    const int64_t W = c.W(), T = c.T();
    Doubles d_inputs(c.inputs.size(), 0.0);  // of the state first, then of the inputs
    for (int64_t i = 0; i < W - 1; ++i) {
      d_inputs[static_cast<size_t>(T + i)] += d_final[static_cast<size_t>(i)];
    }
    for (int64_t t = 0; t < T; ++t) {
      const double slope = c.silu ? SiluSlope(c.Preactivation(t)) : 1;
      const double dp = d_o[static_cast<size_t>(t)] * slope;
      for (int64_t j = 0; j < W; ++j) {
        d_inputs[static_cast<size_t>(t + j)] += c.weight[static_cast<size_t>(j)] * dp;
        Add(out.weight, {c.channel, j}, dp * c.Input(t - (W - 1) + j));
      }
      Add(out.bias, {c.channel}, dp);
    }
    for (int64_t i = 0; i < W - 1; ++i) {
      Put(out.initial.inputs, {c.sequence, c.channel, i}, d_inputs[static_cast<size_t>(i)]);
    }
    for (int64_t t = 0; t < T; ++t) {
      Put(out.x, {c.batch, c.channel, c.tokens[static_cast<size_t>(t)]}, d_inputs[static_cast<size_t>(W - 1 + t)]);
    }
  });
}

}  // namespace heed::causal_conv1d
