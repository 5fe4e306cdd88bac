// Rwkv6TimeMixing and Rwkv6ChannelMixing: the two layers of an RWKV-6 block, "Finch". The share of the previous token
// that is mixed into a token depends on both, and so does the decay.
//
//   d = before - x                                         before: x of the previous token, 0 at first
//   m = tanh((x + time_maa_x .* d) time_maa_w1), five parts, one for each a of w, k, v, r, g
//   x_a = x + (time_maa_a + m_a time_maa_w2[a]) .* d
//   log_decay = -exp(time_decay + tanh(x_w time_decay_w1) time_decay_w2)
//   time     y = output(ln_x(rwkv6(receptance(x_r), key(x_k), value(x_v), log_decay, time_faaaa)) .* silu(gate(x_g)))
//   channel  y = sigmoid(receptance(x_r)) .* value(relu(key(x_k))^2), where x_a = x + time_maa_a .* d
//
// ln_x is a layer norm of each head, with weights per channel. Source: Peng et al., arXiv:2404.05892. Names of tensors
// are those of the folders that the authors publish for Transformers, Rwkv6SelfAttention and Rwkv6FeedForward. With
// Residual and layer norms before them they are its block.
#ifndef HEED_LAYERS_RWKV6_LAYER_H_
#define HEED_LAYERS_RWKV6_LAYER_H_

#include <cstdint>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Rwkv6TimeMixing : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t inner = 0;  // channels of the recurrence; 0: width
    int64_t head_dim = 64;
    int64_t mix_rank = 32, decay_rank = 64;
    double norm_eps = 64e-5;
  };

  // Takes time_maa_x, time_maa_w, time_maa_k, time_maa_v, time_maa_r and time_maa_g [1, 1, width], time_maa_w1 [width,
  // 5 mix_rank], time_maa_w2 [5, mix_rank, width], time_decay [1, 1, inner], time_decay_w1 [width, decay_rank],
  // time_decay_w2 [decay_rank, inner], time_faaaa [inner / head_dim, head_dim], key.weight, value.weight,
  // receptance.weight and gate.weight [inner, width], output.weight [width, inner], ln_x.weight and ln_x.bias [inner].
  Rwkv6TimeMixing(const Config& config, const Weights& weights);

  // The state: "shift" [B, width], the last token's x, and "S" [B, inner / head_dim, head_dim, head_dim].
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  // One of the five mixes: its low-rank matrix, and the projection of the mixed rows.
  struct Part {
    Linear mix, product;
  };

  Config config_;
  std::vector<float> mix_, bonus_, norm_weight_, norm_bias_;
  Linear mix_in_, decay_out_, out_;
  Part decay_, key_, value_, receptance_, gate_;
};

class HEED_API Rwkv6ChannelMixing : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t inner = 0;  // 0: 3.5 width, rounded down to a multiple of 32
  };

  // Takes time_maa_k and time_maa_r [1, 1, width], key.weight [inner, width], receptance.weight [width, width],
  // value.weight [width, inner].
  Rwkv6ChannelMixing(const Config& config, const Weights& weights);

  // The state: "shift" [B, width], the last token's x.
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  std::vector<float> mix_key_, mix_receptance_;
  Linear key_, value_, receptance_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_RWKV6_LAYER_H_
