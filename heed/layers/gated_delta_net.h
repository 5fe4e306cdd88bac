// GatedDeltaNet: a short convolution and the gated delta rule, between projections, with a gated RMS norm of each head:
// the linear attention of Qwen3-Next.
//
//   (q, k, v, z, b, a) = in_proj(x);  (q, k, v) = silu(conv(q, k, v));  q, k of norm 1
//   log_decay = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
//   y = out_proj(rms(gated_delta_rule(q, k, v, log_decay, beta)) .* silu(z))
//
// Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464. Names of tensors and the order of their rows, which are grouped
// by key head, are those of Transformers' Qwen3NextGatedDeltaNet.
#ifndef HEED_LAYERS_GATED_DELTA_NET_H_
#define HEED_LAYERS_GATED_DELTA_NET_H_

#include <cstdint>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API GatedDeltaNet : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t key_heads = 0, value_heads = 0;  // key_heads divides value_heads; value_heads 0: key_heads
    int64_t key_dim = 128, value_dim = 128;  // channels of a head
    int64_t conv = 4;                        // taps
    double norm_eps = 1e-6;
  };

  // Takes, with keys = key_heads key_dim and values = value_heads value_dim, in_proj_qkvz.weight [2 keys + 2 values,
  // width], in_proj_ba.weight [2 value_heads, width], conv1d.weight [2 keys + values, 1, conv], dt_bias and A_log
  // [value_heads], norm.weight [value_dim], out_proj.weight [width, values].
  GatedDeltaNet(const Config& config, const Weights& weights);

  // The state: "conv" [B, 2 keys + values, conv - 1], the last inputs of the convolution, and "S" [B, value_heads,
  // key_dim, value_dim].
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  Linear in_, out_;  // q, k, v, z, b, a
  std::vector<float> conv_, rates_, step_bias_, norm_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_GATED_DELTA_NET_H_
