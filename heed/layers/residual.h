// Residual: a layer with a norm before or after it, and a residual connection.
//
//   pre   y = x + layer(norm(x))
//   post  y = norm(x + layer(x))
#ifndef HEED_LAYERS_RESIDUAL_H_
#define HEED_LAYERS_RESIDUAL_H_

#include <functional>
#include <memory>
#include <string>

#include "heed/layers/layer.h"
#include "heed/layers/norm.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Residual : public Layer {
 public:
  struct Config {
    Norm::Config norm;
    std::string norm_name;   // "input_layernorm", for "input_layernorm.weight"
    std::string layer_name;  // "self_attn": prefix of the layer's names; empty: none, as in BERT's Mlp
    bool post = false;
  };

  // Takes a layer that was made with OfLayer(config, weights).
  Residual(const Config& config, const Weights& weights, std::unique_ptr<const Layer> layer);

  static Weights OfLayer(const Config& config, const Weights& weights) {
    return config.layer_name.empty() ? weights : weights.At(config.layer_name + ".");
  }

  // Makes the layer too.
  template <class L>
  static std::unique_ptr<Residual> Of(const Config& config, const typename L::Config& layer, const Weights& weights) {
    return std::make_unique<Residual>(config, weights, std::make_unique<const L>(layer, OfLayer(config, weights)));
  }

  State MakeState(const StateOptions& options = {}) const override { return layer_->MakeState(options); }
  bool takes_global_tokens() const override { return layer_->takes_global_tokens(); }
  void Check(const Tokens& tokens, const State* state) const override { layer_->Check(tokens, state); }
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // `layer` computes the layer's own reference.
  using LayerReference = std::function<void(const Weights& weights, const ConstTensorView& x, const TensorView& y)>;
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x,
                        const LayerReference& layer, const TensorView& y);

 private:
  Config config_;
  Norm norm_;
  std::unique_ptr<const Layer> layer_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_RESIDUAL_H_
