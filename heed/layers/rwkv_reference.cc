// References of the layers of RWKV-4 and RWKV-6.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "heed/layers/reference_internal.h"
#include "heed/layers/rwkv4_layer.h"
#include "heed/layers/rwkv6_layer.h"
#include "heed/ops/gated/rwkv4/rwkv4.h"
#include "heed/ops/gated/rwkv6/rwkv6.h"

namespace heed::layers {

using reference::Array;
using reference::Tensor;

namespace {

double MinusExp(double x) { return -std::exp(x); }

double Sigmoid(double x) { return ActivationReference(Activation::kSigmoid, x); }

double SquaredRelu(double x) { return ActivationReference(Activation::kSquaredRelu, x); }

// product(mix .* x + (1 - mix) .* before).
Array Mixed(const Array& x, const Call& call, const Weights& weights, const std::string& name, int64_t outputs) {
  const int64_t width = x.last();
  const Array mix = Tensor(weights, "time_mix_" + name, {1, 1, width}), before = Shifted(x, call);
  Array mixed = x;
  for (int64_t i = 0; i < std::ssize(x.values); ++i)
    mixed[i] = mix[i % width] * x[i] + (1 - mix[i % width]) * before[i];
  return Product(mixed, weights, {name, outputs, false});
}

}  // namespace

void Rwkv4TimeMixing::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                const Call& call, const TensorView& y) {
  const int64_t inner = config.inner == 0 ? config.width : config.inner;
  const Array rows(x), k = Mixed(rows, call, weights, "key", inner), v = Mixed(rows, call, weights, "value", inner);
  const Array r = Map(Mixed(rows, call, weights, "receptance", inner), Sigmoid);
  const Array decay = Map(Tensor(weights, "time_decay", {inner}), MinusExp),
              bonus = Tensor(weights, "time_first", {inner});
  rwkv4::Inputs in;
  in.k = k.view();
  in.v = v.view();
  in.log_decay = decay.view();
  in.u = bonus.view();
  rwkv4::Options options;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  Array o(k.sizes);
  rwkv4::Outputs out;
  out.o = o.view();
  rwkv4::Reference(in, options, out);
  Product(Times(r, o), weights, {"output", config.width, false}).Store(y);
}

void Rwkv4ChannelMixing::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                   const Call& call, const TensorView& y) {
  const int64_t inner = config.inner == 0 ? 4 * config.width : config.inner;
  const Array rows(x), r = Map(Mixed(rows, call, weights, "receptance", config.width), Sigmoid);
  const Array k = Map(Mixed(rows, call, weights, "key", inner), SquaredRelu);
  Times(r, Product(k, weights, {"value", config.width, false})).Store(y);
}

namespace {

// x + share .* (before - x), with a share per channel, or per row and channel.
Array Towards(const Array& x, const Array& before, const Array& share) {
  Array y = x;
  for (int64_t i = 0; i < std::ssize(x.values); ++i) y[i] += share[i % std::ssize(share.values)] * (before[i] - x[i]);
  return y;
}

// tanh(x first) second, for matrices [inputs, outputs].
Array OfLowRank(const Array& x, const Array& first, const Array& second) {
  const auto product = [](const Array& a, const Array& w) {
    std::vector<int64_t> sizes = a.sizes;
    sizes.back() = w.last();
    Array y(sizes);
    for (int64_t row = 0; row < a.rows(); ++row) {
      for (int64_t i = 0; i < w.last(); ++i) {
        for (int64_t e = 0; e < a.last(); ++e) y[row * w.last() + i] += a[row * a.last() + e] * w[e * w.last() + i];
      }
    }
    return y;
  };
  return product(Map(product(x, first), [](double value) { return std::tanh(value); }), second);
}

// The layer norm of each head: (x - mean) / sqrt(variance + eps) .* weight + bias.
Array HeadNorm(const Array& x, const Array& weight, const Array& bias, int64_t size, double eps) {
  Array y = x;
  const double n = static_cast<double>(size);
  for (int64_t begin = 0; begin < std::ssize(x.values); begin += size) {
    double mean = 0, variance = 0;
    for (int64_t i = begin; i < begin + size; ++i) mean += x[i] / n;
    for (int64_t i = begin; i < begin + size; ++i) variance += (x[i] - mean) * (x[i] - mean) / n;
    for (int64_t i = begin; i < begin + size; ++i) {
      const int64_t channel = i % std::ssize(weight.values);
      y[i] = (x[i] - mean) / std::sqrt(variance + eps) * weight[channel] + bias[channel];
    }
  }
  return y;
}

}  // namespace

void Rwkv6TimeMixing::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                const Call& call, const TensorView& y) {
  const int64_t width = config.width, inner = config.inner == 0 ? width : config.inner, K = config.head_dim;
  const int64_t H = inner / K, rank = config.mix_rank;
  const Array rows(x), before = Shifted(rows, call),
                       common = Towards(rows, before, Tensor(weights, "time_maa_x", {1, 1, width}));
  const Array first = Tensor(weights, "time_maa_w1", {width, 5 * rank}),
              second = Tensor(weights, "time_maa_w2", {5, rank, width});
  const auto shifted = [&](char letter) {
    const int64_t part = static_cast<int64_t>(std::string("wkvrg").find(letter));
    Array own({rank, width});
    for (int64_t i = 0; i < rank * width; ++i) own[i] = second[part * rank * width + i];
    Array share = OfLowRank(common, first.Channels(part * rank, (part + 1) * rank), own);
    const Array constant = Tensor(weights, std::string("time_maa_") + letter, {1, 1, width});
    for (int64_t i = 0; i < std::ssize(share.values); ++i) share[i] += constant[i % width];
    return Towards(rows, before, share);
  };
  Array decay = OfLowRank(shifted('w'), Tensor(weights, "time_decay_w1", {width, config.decay_rank}),
                          Tensor(weights, "time_decay_w2", {config.decay_rank, inner}));
  const Array constant = Tensor(weights, "time_decay", {1, 1, inner});
  for (int64_t i = 0; i < std::ssize(decay.values); ++i) decay[i] = MinusExp(decay[i] + constant[i % inner]);
  const std::vector<int64_t> flat = decay.sizes, heads = {flat[0], flat[1], H, K};
  const auto projected = [&](char letter, const char* name) {
    return Product(shifted(letter), weights, {name, inner, false}).Reshaped(heads);
  };
  const Array r = projected('r', "receptance"), k = projected('k', "key"), v = projected('v', "value"),
              bonus = Tensor(weights, "time_faaaa", {H, K});
  decay.sizes = heads;
  rwkv6::Inputs in;
  in.r = r.view();
  in.k = k.view();
  in.v = v.view();
  in.log_decay = std::as_const(decay).view();
  in.u = bonus.view();
  rwkv6::Options options;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  Array o(heads);
  rwkv6::Outputs out;
  out.o = o.view();
  rwkv6::Reference(in, options, out);
  const Array gate =
      Map(projected('g', "gate"), [](double value) { return ActivationReference(Activation::kSilu, value); });
  const Array normed =
      HeadNorm(o, Tensor(weights, "ln_x.weight", {inner}), Tensor(weights, "ln_x.bias", {inner}), K, config.norm_eps);
  Product(Times(normed, gate).Reshaped(flat), weights, {"output", width, false}).Store(y);
}

void Rwkv6ChannelMixing::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                   const Call& call, const TensorView& y) {
  const int64_t width = config.width, inner = config.inner == 0 ? width * 7 / 2 / 32 * 32 : config.inner;
  const Array rows(x), before = Shifted(rows, call);
  const auto shifted = [&](const char* name) { return Towards(rows, before, Tensor(weights, name, {1, 1, width})); };
  const Array r = Map(Product(shifted("time_maa_r"), weights, {"receptance", width, false}), Sigmoid);
  const Array k = Map(Product(shifted("time_maa_k"), weights, {"key", inner, false}), SquaredRelu);
  Times(r, Product(k, weights, {"value", width, false})).Store(y);
}

}  // namespace heed::layers
