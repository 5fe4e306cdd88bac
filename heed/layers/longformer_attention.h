// LongformerAttention: a window for all tokens, and global tokens with projections of their own, which see all tokens
// and are seen by all.
//
// Source: Beltagy, Peters, Cohan, arXiv:2004.05150. Names of tensors are those of Transformers' LongformerAttention;
// with Residual and a layer norm after it, it is the attention of its block. BigBird's attention is MultiHeadAttention
// with patterns::BigBird().
#ifndef HEED_LAYERS_LONGFORMER_ATTENTION_H_
#define HEED_LAYERS_LONGFORMER_ATTENTION_H_

#include <cstdint>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API LongformerAttention : public Layer {
 public:
  struct Config {
    int64_t width = 0, heads = 0;  // heads divide width
    int64_t window = 512;          // half of it before a token, half after it
  };

  // Takes self.query, self.key, self.value, self.query_global, self.key_global, self.value_global and output.dense,
  // each .weight [width, width] and .bias [width].
  LongformerAttention(const Config& config, const Weights& weights);

  // Throws InvalidArgument: later tokens change the results of earlier ones.
  State MakeState(const StateOptions& options = {}) const override;
  bool takes_global_tokens() const override { return true; }
  void Check(const Tokens& tokens, const State* state) const override;

  // The global tokens are call.global_tokens; without any, their projections are not computed.
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes Forward() from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  Linear in_, query_, both_, out_;  // in_: q, k, v; query_: q of global tokens; both_: their k and v
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_LONGFORMER_ATTENTION_H_
