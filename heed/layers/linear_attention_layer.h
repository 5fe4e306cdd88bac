// LinearAttention: a recurrence, by its name, between projections, with a norm of each head and a gate: RetNet, gated
// linear attention, DeltaNet and related layers.
//
//   (q, k, v, g) = projections of x;  optionally (q, k, v) = silu(conv(q, k, v)), and q, k rotated by positions
//   y = o_proj(rms(recurrence(q, k, v, ...)) .* silu(g))
//
//   mechanism           further arguments                                       q and k
//   "linear_attention"  none; normalised, with features elu + 1                 unchanged
//   "retention"         none: constant decays; with rotary it is RetNet's       unchanged
//   "simple_gla"        log_decay = log(sigmoid(gk_proj(x))) / 16 per head       unchanged
//   "gla"               the same per key channel, through 16 channels           unchanged
//   "delta_rule"        beta = sigmoid(b_proj(x))                                silu, norm 1
//   "gated_delta_rule"  beta, and log_decay = -exp(A_log) softplus(a_proj(x) + dt_bias)  silu, norm 1
//
// Names of tensors are those of the layers of flash-linear-attention.
#ifndef HEED_LAYERS_LINEAR_ATTENTION_LAYER_H_
#define HEED_LAYERS_LINEAR_ATTENTION_LAYER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"
#include "heed/ops/positions/rotary.h"

namespace heed::layers {

struct LinearMechanism;  // a row of the table above

class HEED_API LinearAttention : public Layer {
 public:
  struct Config {
    std::string mechanism = "retention";
    int64_t width = 0, heads = 0;
    int64_t key_dim = 0, value_dim = 0;        // channels of a head; 0: width / heads
    int64_t conv = 0;                          // taps of the convolution; 0: none
    std::optional<RotaryOptions> rotary = {};  // half split, for queries and keys
    bool gate = true;                          // g_proj
    double norm_eps = 1e-5;
    std::string norm = "g_norm";  // names its weight
    int64_t gate_rank = 16;       // "gla": channels between gk_proj.0 and gk_proj.1
    double gate_divisor = 16;
  };

  // Takes q_proj.weight and k_proj.weight [heads key_dim, width], v_proj.weight and, with a gate, g_proj.weight [heads
  // value_dim, width], o_proj.weight [width, heads value_dim], g_norm.weight [value_dim]; with conv q_conv1d.weight,
  // k_conv1d.weight and v_conv1d.weight [channels, 1, conv]; gk_proj.weight [heads, width] and its bias, or
  // gk_proj.0.weight [gate_rank, width] and gk_proj.1.weight [heads key_dim, gate_rank] and its bias; b_proj.weight and
  // a_proj.weight [heads, width], A_log and dt_bias [heads].
  LinearAttention(const Config& config, const Weights& weights);

  // The state: "S" [B, heads, key_dim, value_dim], "z" [B, heads, key_dim] if outputs are normalised, and with conv
  // "conv" [B, channels, conv - 1].
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  const LinearMechanism* mechanism_;
  Linear in_, gate_, out_;  // in_: q, k, v, g, inputs of gates; gate_: gk_proj.1
  std::vector<float> conv_, norm_, factor_, bias_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_LINEAR_ATTENTION_LAYER_H_
