// Mamba2: a short convolution, the recurrence of state space duality and a gated RMS norm, between two projections.
//
//   (z, xBC, dt) = in_proj(x);  (x', B, C) = silu(conv(xBC))
//   y = out_proj(rms(ssd(x', dt, A, B, C, D) .* silu(z)))          A = -exp(A_log)
//
// The norm is per group. Source: Dao, Gu, arXiv:2405.21060. Names of tensors are those of Transformers' Mamba2Mixer;
// with Residual and an RMS norm before it, it is its block.
#ifndef HEED_LAYERS_MAMBA2_H_
#define HEED_LAYERS_MAMBA2_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "heed/layers/layer.h"
#include "heed/layers/linear.h"
#include "heed/layers/weights.h"

namespace heed::layers {

class HEED_API Mamba2 : public Layer {
 public:
  struct Config {
    int64_t width = 0;
    int64_t heads = 0, head_dim = 64;  // the recurrence has heads head_dim channels
    int64_t groups = 1;                // number of groups of heads that share B and C; divides heads
    int64_t state = 128;
    int64_t conv = 4;   // taps
    bool bias = false;  // of in_proj and out_proj
    bool conv_bias = true;
    double norm_eps = 1e-5;
    double step_min = 0, step_max = std::numeric_limits<double>::infinity();  // time_step_limit
  };

  // Takes, with inner = heads head_dim and mixed = inner + 2 groups state, in_proj.weight [inner + mixed + heads,
  // width], conv1d.weight [mixed, 1, conv], dt_bias, A_log and D [heads], norm.weight [inner], out_proj.weight [width,
  // inner], and in_proj.bias, conv1d.bias and out_proj.bias if configured.
  Mamba2(const Config& config, const Weights& weights);

  // The state: "conv" [B, mixed, conv - 1], the last inputs of the convolution, and "ssd" [B, heads, head_dim, state].
  State MakeState(const StateOptions& options = {}) const override;
  void Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const override;

  // Computes what Forward does without a state, from the weights themselves, in double.
  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const Call& call,
                        const TensorView& y);

 private:
  Config config_;
  int64_t inner_, mixed_;
  Linear in_, out_;
  std::vector<float> conv_, conv_bias_, A_, D_, step_bias_, norm_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_MAMBA2_H_
