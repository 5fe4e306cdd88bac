// MultiHeadAttention: projections of queries, keys and values, exact attention, and a projection of its outputs. It is
// self or cross attention, causal or not, masked or not.
//
// Source: Vaswani et al., "Attention is all you need", arXiv:1706.03762. With Residual around it, it is the attention
// of BERT and MiniLM (post norm) and of GPT-2 (pre norm), and with a pattern that of BigBird.
#ifndef HEED_LAYERS_MULTI_HEAD_ATTENTION_H_
#define HEED_LAYERS_MULTI_HEAD_ATTENTION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"
#include "heed/patterns/pattern.h"

namespace heed::layers {

class HEED_API MultiHeadAttention : public Layer {
 public:
  struct Names {
    std::string query = "q_proj", key = "k_proj", value = "v_proj", output = "out_proj";  // Bart, Whisper
    std::string fused;        // one matrix of queries, keys and values, which replaces the first three
    bool transposed = false;  // weights are [inputs, outputs]
  };
  static Names Bert() { return {"self.query", "self.key", "self.value", "output.dense", "", false}; }
  static Names Gpt2() { return {"", "", "", "c_proj", "c_attn", true}; }

  struct Config {
    int64_t width = 0, heads = 0;
    int64_t head_dim = 0;      // 0: width / heads
    int64_t memory_width = 0;  // cross attention: channels of call.memory; 0: self attention
    bool causal = false;
    bool bias = true, key_bias = true;  // all projections; keys, if the others have biases: Whisper's keys have none
    std::optional<double> scale = {};   // default 1 / sqrt(head_dim)
    Pattern pattern = {};               // keys that a token sees, patterns::BigBird() and others; self attention only
    Names names = {};
  };

  // Takes query.weight [heads head_dim, width], key.weight and value.weight [heads head_dim, width or memory_width],
  // output.weight [width, heads head_dim], and their biases; fused.weight has the rows of the first three, one after
  // the other.
  MultiHeadAttention(const Config& config, const Weights& weights);

  // The state: a cache of keys and values. Self attention must be causal, and its cache has the tokens so far. The
  // cache of cross attention has call.memory, which the first call passes and later ones leave out.
  State MakeState(const StateOptions& options = {}) const override;
  void Check(const Tokens& tokens, const State* state) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  bool cross() const { return config_.memory_width != 0; }
  void ComputeSelf(Context& ctx, const Tokens& tokens, const float* x, float* o, State* state) const;
  void ComputeCross(Context& ctx, const Tokens& tokens, const float* x, float* o, State* state) const;

  Config config_;
  Linear in_, memory_, out_;  // in_: q, k, v, or q alone; memory_: k and v of cross attention
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_MULTI_HEAD_ATTENTION_H_
