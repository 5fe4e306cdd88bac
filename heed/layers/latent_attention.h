// LatentAttention: multi-head latent attention of DeepSeek-V2 and V3. A token is stored as one row for all heads: a
// latent c and a key k_r with its position.
//
//   q = q_b(rms(q_a(x))), or q_proj(x), per head (q_n, q_r);  (c, k_r) = kv_a(x),  c = rms(c)
//   (k_n, v) = kv_b(c) per head;  logits scale (<q_n, k_n> + <R q_r, R k_r>)
//
// With kv_b = (U, V) per head, <q_n, U c> = <U^T q_n, c>: over a cache, queries are multiplied with the latents
// themselves, outputs are sums of latents, and V is applied to these (absorbed). Calls that begin their sequences
// expand keys and values of all tokens instead, which takes fewer flops; both agree to rounding.
//
// Source: DeepSeek-AI, arXiv:2405.04434. Names of tensors are those of Transformers' DeepseekV3Attention.
#ifndef HEED_LAYERS_LATENT_ATTENTION_H_
#define HEED_LAYERS_LATENT_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/norm.h"
#include "heed/layers/weights.h"
#include "heed/ops/positions/rotary.h"

namespace heed::layers {

class HEED_API LatentAttention : public Layer {
 public:
  struct Config {
    int64_t width = 0, heads = 0;
    int64_t query_rank = 0;                      // q_lora_rank; 0: queries are computed from x, by q_proj
    int64_t latent = 512;                        // kv_lora_rank
    int64_t nope = 128, rope = 64, value = 128;  // channels of a head: without and with position, values
    RotaryPairs pairs = RotaryPairs::kInterleaved;
    RotaryOptions rotary = {};         // dim is rope
    std::optional<double> scale = {};  // default 1 / sqrt(nope + rope); yarn multiplies it
    double norm_eps = 1e-6;
    bool bias = false;  // of q_a_proj, kv_a_proj_with_mqa and o_proj
  };

  // Takes q_proj.weight [heads (nope + rope), width], or q_a_proj.weight [query_rank, width], q_a_layernorm.weight
  // [query_rank] and q_b_proj.weight [heads (nope + rope), query_rank]; kv_a_proj_with_mqa.weight [latent + rope,
  // width], kv_a_layernorm.weight [latent], kv_b_proj.weight [heads (nope + value), latent], o_proj.weight [width,
  // heads value], and biases if configured.
  LatentAttention(const Config& config, const Weights& weights);

  // The state: a cache of rows (c, R k_r).
  State MakeState(const StateOptions& options = {}) const override;
  void Check(const Tokens& tokens, const State* state) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  void AttendExpanded(Context& ctx, const Tokens& tokens, float* q, const ConstTensorView& rotated,
                      const float* latents, float* o) const;
  void AttendAbsorbed(Context& ctx, const Tokens& tokens, const float* q, const ConstTensorView& rotated,
                      const State& state, float* o) const;

  Config config_;
  double scale_;
  Linear q_a_, q_b_, kv_a_, kv_b_, out_;
  std::vector<Linear> to_latent_, from_latent_;  // per head: U^T, V
  std::vector<float> query_norm_, latent_norm_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_LATENT_ATTENTION_H_
