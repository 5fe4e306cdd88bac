// References of GatedDeltaNet and LatentAttention.
#include <cmath>
#include <vector>

#include "heed/layers/gated_delta_net.h"
#include "heed/layers/latent_attention.h"
#include "heed/layers/reference_internal.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::layers {

using reference::Array;
using reference::Tensor;

void GatedDeltaNet::Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                              const TensorView& y) {
  const int64_t H = config.key_heads, HV = config.value_heads == 0 ? H : config.value_heads, K = config.key_dim,
                V = config.value_dim;
  const int64_t keys = H * K, values = HV * V, shared = HV / H;
  const Array rows(x);
  const int64_t B = rows.sizes[0], T = rows.sizes[1], group = 2 * K + 2 * shared * V;
  const Array qkvz = Product(rows, weights, {"in_proj_qkvz", 2 * keys + 2 * values, false});
  const Array ba = Product(rows, weights, {"in_proj_ba", 2 * HV, false});
  // Rows are grouped by key head; they become all q, then all k, then all v.
  Array mixed({B, T, 2 * keys + values}), z({B, T, HV, V}), beta({B, T, HV}), decay({B, T, HV});
  const Array rate = Tensor(weights, "A_log", {HV}), bias = Tensor(weights, "dt_bias", {HV});
  for (int64_t r = 0; r < B * T; ++r) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t from = r * qkvz.last() + h * group, to = r * mixed.last();
      for (int64_t i = 0; i < K; ++i) {
        mixed[to + h * K + i] = qkvz[from + i];
        mixed[to + keys + h * K + i] = qkvz[from + K + i];
      }
      for (int64_t i = 0; i < shared * V; ++i) {
        mixed[to + 2 * keys + h * shared * V + i] = qkvz[from + 2 * K + i];
        z[r * values + h * shared * V + i] = qkvz[from + 2 * K + shared * V + i];
      }
      for (int64_t i = 0; i < shared; ++i) {
        const int64_t head = h * shared + i, at = r * 2 * HV + h * 2 * shared + i;
        beta[r * HV + head] = ActivationReference(Activation::kSigmoid, ba[at]);
        decay[r * HV + head] = -std::exp(rate[head]) * std::log1p(std::exp(ba[at + shared] + bias[head]));
      }
    }
  }
  const Array convolved = Convolved(mixed, weights, "conv1d", config.conv, false, call);
  const auto unit = [&](const Array& heads) {
    Array scaled = heads;
    for (int64_t begin = 0; begin < std::ssize(heads.values); begin += K) {
      double squares = 1e-6;
      for (int64_t i = 0; i < K; ++i) squares += heads[begin + i] * heads[begin + i];
      for (int64_t i = 0; i < K; ++i) scaled[begin + i] /= std::sqrt(squares);
    }
    return scaled;
  };
  const Array q = unit(convolved.Channels(0, keys, {H, K})), k = unit(convolved.Channels(keys, 2 * keys, {H, K})),
              v = convolved.Channels(2 * keys, 2 * keys + values, {HV, V});
  gated_delta_rule::Inputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.log_decay = decay.view();
  in.beta = beta.view();
  gated_delta_rule::Options options;
  options.lengths = call.lengths;
  options.cu_seqlens = call.cu_seqlens;
  Array o(v.sizes);
  gated_delta_rule::Outputs out;
  out.o = o.view();
  gated_delta_rule::Reference(in, options, out);
  const Array normed = RmsNorm(o, Tensor(weights, "norm.weight", {V}), config.norm_eps);
  const Array gated = Times(normed, Map(z, [](double value) { return ActivationReference(Activation::kSilu, value); }));
  Product(gated.Reshaped({B, T, values}), weights, {"out_proj", config.width, false}).Store(y);
}

void LatentAttention::Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                                const Call& call, const TensorView& y) {
  const int64_t H = config.heads, nope = config.nope, rope = config.rope, value = config.value, latent = config.latent;
  const Array rows(x);
  const int64_t B = rows.sizes[0], T = rows.sizes[1];
  Array q = rows;
  if (config.query_rank != 0) {
    q = RmsNorm(Product(rows, weights, {"q_a_proj", config.query_rank, config.bias}),
                Tensor(weights, "q_a_layernorm.weight", {config.query_rank}), config.norm_eps);
  }
  q = Product(q, weights, {config.query_rank == 0 ? "q_proj" : "q_b_proj", H * (nope + rope), false})
          .Reshaped({B, T, H, nope + rope});
  const Array both = Product(rows, weights, {"kv_a_proj_with_mqa", latent + rope, config.bias});
  const Array c =
      RmsNorm(both.Channels(0, latent), Tensor(weights, "kv_a_layernorm.weight", {latent}), config.norm_eps);
  const std::vector<int64_t> positions = reference::Positions(B, T, call);
  const auto rotated = [&](const Array& part) {
    Array result(part.sizes);
    RotaryOptions options = config.rotary;
    options.dim.reset();
    RotaryReference(part.view(), ConstTensorView(positions.data(), DType::kI64, {B, T}), config.pairs, options,
                    result.view());
    return result;
  };
  const Array q_r = rotated(q.Channels(nope, nope + rope)),
              k_r = rotated(both.Channels(latent, latent + rope, {1, rope}));
  const Array expanded =
      Product(c, weights, {"kv_b_proj", H * (nope + value), false}).Reshaped({B, T, H, nope + value});
  const Array v = expanded.Channels(nope, nope + value);
  Array k(q.sizes);
  for (int64_t r = 0; r < B * T * H; ++r) {
    for (int64_t i = 0; i < nope; ++i) k[r * (nope + rope) + i] = expanded[r * (nope + value) + i];
    for (int64_t i = 0; i < rope; ++i) {
      k[r * (nope + rope) + nope + i] = k_r[r / H * rope + i];
      q[r * (nope + rope) + nope + i] = q_r[r * rope + i];
    }
  }
  attention::Options options;
  options.causal = true;
  options.align = attention::Align::kTopLeft;
  options.scale = config.scale.value_or(1 / std::sqrt(static_cast<double>(nope + rope)));
  options.mask = call.mask;
  options.key_lengths = call.lengths;
  options.cu_seqlens_q = call.cu_seqlens;
  Array o(v.sizes);
  attention::Reference({q.view(), k.view(), v.view()}, options, {.o = o.view(), .lse = {}});
  Product(o.Reshaped({B, T, H * value}), weights, {"o_proj", config.width, config.bias}).Store(y);
}

}  // namespace heed::layers
