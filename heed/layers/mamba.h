// Mamba: a short convolution, a selective scan and a gate, between two projections.
//
//   (u, z) = in_proj(x);  u = silu(conv(u));  (d, B, C) = x_proj(u);  delta = dt_proj(d)
//   y = out_proj(selective_scan(u, delta, A, B, C, D, z))        A = -exp(A_log)
//
// Source: Gu, Dao, arXiv:2312.00752. Names of tensors are those of Transformers' MambaMixer; with Residual and an RMS
// norm before it, it is its block.
#ifndef HEED_LAYERS_MAMBA_H_
#define HEED_LAYERS_MAMBA_H_

#include <cstdint>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Mamba : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t inner = 0;      // channels of the scan; 0: 2 width
    int64_t state = 16;     // states per channel
    int64_t conv = 4;       // taps
    int64_t step_rank = 0;  // rank of the time steps; 0: ceil(width / 16)
    bool bias = false;      // of in_proj and out_proj
    bool conv_bias = true;
  };

  // Takes in_proj.weight [2 inner, width], conv1d.weight [inner, 1, conv], x_proj.weight [step_rank + 2 state, inner],
  // dt_proj.weight [inner, step_rank], dt_proj.bias [inner], A_log [inner, state], D [inner], out_proj.weight [width,
  // inner], and in_proj.bias, conv1d.bias and out_proj.bias if configured.
  Mamba(const Config& config, const Weights& weights);

  // The state: "conv" [B, inner, conv - 1], the last inputs of the convolution, and "scan" [B, inner, state].
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  Linear in_, x_, step_, out_;
  std::vector<float> conv_, conv_bias_, A_, D_, step_bias_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_MAMBA_H_
