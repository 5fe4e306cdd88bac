// Norm: layer norm or RMS norm of rows.
//
//   layer  y = (x - mean) / sqrt(variance + eps) .* weight + bias
//   rms    y = x / sqrt(mean of squares + eps) .* weight
#ifndef HEED_LAYERS_NORM_H_
#define HEED_LAYERS_NORM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/layers/weights.h"

namespace heed::layers {

enum class NormKind { kLayer, kRms };

class HEED_API Norm {
 public:
  struct Config {
    int64_t width = 0;
    NormKind kind = NormKind::kRms;
    double eps = 1e-5;
  };

  // Takes "weight" [width], and "bias" for layer norms.
  Norm(const Config& config, const Weights& weights);

  int64_t width() const { return config_.width; }

  // y = norm(x), f32 [rows, width], each row contiguous. y may be x itself; otherwise it shares no memory with it.
  void Forward(Context& ctx, const ConstTensorView& x, const TensorView& y) const;
  void Rows(Context& ctx, const float* x, int64_t rows, float* y) const;  // without checks

  static void Reference(const Config& config, const Weights& weights, const ConstTensorView& x, const TensorView& y);

 private:
  Config config_;
  std::vector<float> weight_, bias_;
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_NORM_H_
