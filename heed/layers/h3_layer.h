// H3: linear attention through two state spaces, a shift of keys and one that decays, between projections.
//
//   y = out_proj(h3(q_proj(x), k_proj(x), v_proj(x)))
//
// Source: Fu, Dao et al., arXiv:2212.14052. Transformers has no such layer: the names of tensors are those of the
// operator.
#ifndef HEED_LAYERS_H3_LAYER_H_
#define HEED_LAYERS_H3_LAYER_H_

#include <cstdint>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API H3 : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t heads = 0;   // divides width; 0: width, all products elementwise
    int64_t modes = 32;  // complex states per pair of channels
    int64_t shift = 4;   // taps of the shift of keys
    bool bias = true;    // of the projections
  };

  // Takes q_proj, k_proj, v_proj and out_proj, each .weight [width, width] and .bias [width], shift [width, shift],
  // shift_D [width], log_dt [heads], log_A_real and A_imag [heads, modes], C [heads, modes, 2], D [heads].
  H3(const Config& config, const Weights& weights);

  // The state: "S" [B, heads, d, d, modes, 2] and "tail" [B, shift - 1, heads, d], with d = width / heads.
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  Linear in_, out_;
  std::vector<float> shift_, shift_D_, log_dt_, log_A_real_, A_imag_, C_, D_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_H3_LAYER_H_
