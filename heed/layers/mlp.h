// Mlp: two products with an activation between them, gated or not.
//
//   y = down(activation(gate(x)) .* up(x))      gated: Llama and related families
//   y = down(activation(up(x)))                 not gated: BERT, GPT-2
#ifndef HEED_LAYERS_MLP_H_
#define HEED_LAYERS_MLP_H_

#include <cstdint>
#include <string>

#include "heed/layers/activation.h"
#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Mlp : public Layer {
 public:
  struct Names {
    std::string gate = "gate_proj";  // empty: not gated
    std::string up = "up_proj", down = "down_proj";
    bool transposed = false;
  };
  static Names Llama() { return {}; }
  static Names Bert() { return {"", "intermediate.dense", "output.dense"}; }
  static Names Gpt2() { return {"", "c_fc", "c_proj", true}; }

  struct Config {
    int64_t width = 0, inner = 0;
    Activation activation = Activation::kSilu;
    bool bias = false;
    Names names = {};
  };

  // Takes up.weight [inner, width], down.weight [width, inner], gate.weight of the shape of up's if gated, and their
  // biases.
  Mlp(const Config& config, const Weights& weights);

  // The state is empty, because outputs do not depend on earlier tokens.
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  Linear up_, down_;  // the gate precedes up, in one product
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_MLP_H_
