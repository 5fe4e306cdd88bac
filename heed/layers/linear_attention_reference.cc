// Reference of LinearAttention.
#include <cmath>
#include <vector>

#include "heed/layers/linear_attention_layer.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/reference_internal.h"

namespace heed::layers {

using reference::Array;
using reference::Tensor;

void LinearAttention::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                const Call& call, const TensorView& y) {
  const LinearMechanism& of = LinearMechanismNamed("layers::LinearAttention", config.mechanism);
  const int64_t H = config.heads, K = config.key_dim == 0 ? config.width / H : config.key_dim,
                V = config.value_dim == 0 ? config.width / H : config.value_dim;
  const Array rows(x);
  const int64_t B = rows.sizes[0], T = rows.sizes[1];
  const auto silu = [](double value) { return ActivationReference(Activation::kSilu, value); };
  const auto sigmoid = [](double value) { return ActivationReference(Activation::kSigmoid, value); };
  const auto project = [&](const std::string& kind, int64_t size) {
    Array part = Product(rows, weights, {kind + "_proj", H * size, false});
    if (config.conv != 0) {
      part = Convolved(part, weights, kind + "_conv1d", config.conv, false, call);
    } else if (of.beta) {
      part = Map(part, silu);
    }
    return part.Reshaped({B, T, H, size});
  };
  Array q = project("q", K), k = project("k", K);
  const Array v = project("v", V);
  for (Array* part : {&q, &k}) {
    for (int64_t begin = 0; begin < std::ssize(part->values) && of.beta; begin += K) {
      double squares = 1e-6;
      for (int64_t i = 0; i < K; ++i) squares += (*part)[begin + i] * (*part)[begin + i];
      for (int64_t i = 0; i < K; ++i) (*part)[begin + i] /= std::sqrt(squares);
    }
    if (!config.rotary) continue;
    Array rotated(part->sizes);
    const std::vector<int64_t> positions = reference::Positions(B, T, call);
    RotaryReference(part->view(), ConstTensorView(positions.data(), DType::kI64, {B, T}), RotaryPairs::kHalfSplit,
                    *config.rotary, rotated.view());
    *part = rotated;
  }
  Array decay, beta;
  if (of.decay == LinearMechanism::kHead) decay = Product(rows, weights, {"gk_proj", H, true});
  if (of.decay == LinearMechanism::kKey) {
    decay =
        Product(Product(rows, weights, {"gk_proj.0", config.gate_rank, false}), weights, {"gk_proj.1", H * K, true});
    decay = decay.Reshaped({B, T, H, K});
  }
  if (of.decay == LinearMechanism::kStep) {
    decay = Product(rows, weights, {"a_proj", H, false});
    const Array rate = Tensor(weights, "A_log", {H}), bias = Tensor(weights, "dt_bias", {H});
    for (int64_t i = 0; i < std::ssize(decay.values); ++i)
      decay[i] = -std::exp(rate[i % H]) * std::log1p(std::exp(decay[i] + bias[i % H]));
  } else if (of.decay != LinearMechanism::kNone) {
    decay = Map(decay, [&](double value) { return std::log(sigmoid(value)) / config.gate_divisor; });
  }
  if (of.beta) beta = Map(Product(rows, weights, {"b_proj", H, false}), sigmoid);
  NamedViews in;
  in.Add("q", q.view());
  in.Add("k", k.view());
  in.Add("v", v.view());
  if (of.decay != LinearMechanism::kNone) in.Add("log_decay", decay.view());
  if (of.beta) in.Add("beta", beta.view());
  Array o(v.sizes);
  RecurrenceReference(of.passes(), in, call, o.view());
  Array normed = RmsNorm(o, Tensor(weights, config.norm + ".weight", {V}), config.norm_eps);
  if (config.gate) normed = Times(normed, Map(Product(rows, weights, {"g_proj", H * V, false}), silu));
  Product(normed.Reshaped({B, T, H * V}), weights, {"o_proj", config.width, false}).Store(y);
}

}  // namespace heed::layers
