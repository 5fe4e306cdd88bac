// GroupedQueryAttention: attention in which several query heads share a key head, with rotary positions: Llama, Mistral
// (a window), Qwen2 (biases), Qwen3 (norms of queries and keys). It is causal by default; some embedding models are
// not.
//
// Source: Ainslie et al., arXiv:2305.13245; Su et al., arXiv:2104.09864. With Residual and an RMS norm before it, it is
// the attention of a decoder block.
#ifndef HEED_LAYERS_GROUPED_QUERY_ATTENTION_H_
#define HEED_LAYERS_GROUPED_QUERY_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"
#include "heed/state/cache_rotary.h"

namespace heed::layers {

class Frame;

class HEED_API GroupedQueryAttention : public Layer {
 public:
  struct Config {
    int64_t width = 0, heads = 0;
    int64_t kv_heads = 0;  // divides heads; 0: heads
    int64_t head_dim = 0;  // 0: width / heads
    bool bias = false;     // of queries, keys and values
    bool output_bias = false;
    bool qk_norm = false;    // RMS norms of each head's queries and keys, before rotation
    double norm_eps = 1e-6;  // of these norms
    // Llama's is kHalfSplit with base rope_theta. Types whose frequencies depend on a sequence's length rotate the
    // tokens of a call by the length that the sequence has after it; keys in the cache keep their rotation.
    // Transformers does the same. Therefore, as soon as a sequence is longer than the original length, the result
    // depends on its split into calls.
    std::optional<CacheRotary> rotary = {};
    bool causal = true;  // if false, there is no state
    // The number of tokens that a token sees, itself included; 0: all before it. If not `causal`, the number of tokens
    // that it sees on each side.
    int64_t window = 0;
    std::optional<double> scale = {};  // default 1 / sqrt(head_dim)
  };

  // Takes q_proj.weight [heads head_dim, width], k_proj.weight and v_proj.weight [kv_heads head_dim, width],
  // o_proj.weight [width, heads head_dim], their biases if configured, and with qk_norm q_norm.weight and k_norm.weight
  // [head_dim].
  GroupedQueryAttention(const Config& config, const Weights& weights);

  // The state: a cache of rotated keys, and values. Throws InvalidArgument if the layer is not causal.
  State MakeState(const StateOptions& options = {}) const override;
  void Check(const Tokens& tokens, const State* state) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  bool CacheRotates() const;  // true if the cache rotates keys when it takes them
  TensorView Rotated(Context& ctx, Frame& frame, const Tokens& tokens, const ConstTensorView& positions,
                     const ConstTensorView& heads) const;

  Config config_;
  Linear in_, out_;
  std::vector<float> query_norm_, key_norm_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_GROUPED_QUERY_ATTENTION_H_
