// Norm: its weights, and the call of its kernel.
#include "heed/layers/norm.h"

#include <cmath>

#include "heed/core/error.h"
#include "heed/layers/layer.h"
#include "heed/layers/rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {

Norm::Norm(const Config& config, const Weights& weights) : config_(config) {
  CheckConfig("layers::Norm", "width", config.width);
  if (!(config.eps >= 0 && std::isfinite(config.eps))) {
    throw InvalidArgument("layers::Norm: config.eps is " + std::to_string(config.eps) +
                          ", expected a finite number, at least 0");
  }
  weight_ = weights.Floats("weight", {config.width});
  if (config.kind == NormKind::kLayer) bias_ = weights.Floats("bias", {config.width});
}

void Norm::Rows(Context& ctx, const float* x, int64_t rows, float* y) const {
  ScaleRows call;
  call.scaling = config_.kind == NormKind::kLayer ? Scaling::kLayer : Scaling::kRms;
  call.x = {x, config_.width};
  call.y = {y, config_.width};
  call.weight = weight_.data();
  call.bias = bias_.empty() ? nullptr : bias_.data();
  call.eps = config_.eps;
  call.rows = static_cast<size_t>(rows);
  call.size = static_cast<size_t>(config_.width);
  Run(ctx, call);
}

void Norm::Forward(Context& ctx, const ConstTensorView& x, const TensorView& y) const {
  constexpr const char* op = "layers::Norm::Forward";
  mechanism::CheckReadable(op, "x", x);
  if (x.rank() != 2)
    mechanism::Fail(op, "x", "has shape " + x.ShapeString(), "[rows, " + std::to_string(config_.width) + "]");
  mechanism::CheckTensor(op, "x", x, {x.size(0), config_.width}, DType::kF32, true);
  mechanism::CheckTensor(op, "y", y, {x.size(0), config_.width}, DType::kF32, true);
  for (const auto& [name, t] : {std::pair<const char*, ConstTensorView>{"x", x}, {"y", y}}) {
    mechanism::CheckContiguousRows(op, name, t);
    if (t.size(0) > 1 && t.stride(0) != config_.width) {
      mechanism::Fail(op, name, "has stride " + std::to_string(t.stride(0)),
                      std::to_string(config_.width) + ": row-major");
    }
  }
  if (y.data() != x.data()) mechanism::CheckWritable(op, "y", y, "x", x);
  Rows(ctx, x.as<float>(), x.size(0), y.as<float>());
}

}  // namespace heed::layers
