// Rwkv4TimeMixing and Rwkv4ChannelMixing: the two layers of an RWKV-4 block. Each mixes a token with the previous one.
//
//   x_k = mix_k .* x + (1 - mix_k) .* before, x_v and x_r in the same way    before: x of the previous token, 0 at
//   first time     y = output(sigmoid(receptance(x_r)) .* rwkv4(key(x_k), value(x_v))) channel  y =
//   sigmoid(receptance(x_r)) .* value(relu(key(x_k))^2)
//
// Source: Peng et al., arXiv:2305.13048. Names of tensors are those of Transformers' RwkvSelfAttention and
// RwkvFeedForward, which halve the weights of later layers and the rows between them; here this belongs to the whole
// model. With Residual and layer norms before them they are its block.
#ifndef HEED_LAYERS_RWKV4_LAYER_H_
#define HEED_LAYERS_RWKV4_LAYER_H_

#include <cstdint>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Rwkv4TimeMixing : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t inner = 0;  // channels of the recurrence; 0: width
  };

  // Takes time_decay and time_first [inner], time_mix_key, time_mix_value and time_mix_receptance [1, 1, width],
  // key.weight, value.weight and receptance.weight [inner, width], output.weight [width, inner].
  Rwkv4TimeMixing(const Config& config, const Weights& weights);

  // The state: "shift" [B, width], the last token's x, and "num", "den" and "max" [B, inner].
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  std::vector<float> decay_, bonus_, mix_key_, mix_value_, mix_receptance_;
  Linear key_, value_, receptance_, out_;
};

class HEED_API Rwkv4ChannelMixing : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t inner = 0;  // 0: 4 width
  };

  // Takes time_mix_key and time_mix_receptance [1, 1, width], key.weight [inner, width], receptance.weight [width,
  // width], value.weight [width, inner].
  Rwkv4ChannelMixing(const Config& config, const Weights& weights);

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

#endif  // HEED_LAYERS_RWKV4_LAYER_H_
