// Residual: norm, layer, sum.
#include "heed/layers/residual.h"

#include <utility>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/rows_internal.h"

namespace heed::layers {

Residual::Residual(const Config& config, const Weights& weights, std::unique_ptr<const Layer> layer)
    : Layer(layer->name(), layer->width()), config_(config), norm_(config.norm, weights.At(config.norm_name + ".")),
      layer_(std::move(layer)) {
  if (config.norm.width != width()) {
    throw InvalidArgument("layers::Residual: config.norm.width is " + std::to_string(config.norm.width) +
                          ", expected " + std::to_string(width()) + " as the layer's");
  }
}

void Residual::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State* state) const {
  const int64_t rows = tokens.rows();
  Frame frame;
  float* between = frame.Floats(rows * width());
  AddRows add;
  add.a = {x, width()};
  add.rows = static_cast<size_t>(rows);
  add.size = static_cast<size_t>(width());
  add.y = {y, width()};
  if (config_.post) {
    layer_->Compute(ctx, tokens, x, between, state);
    add.b = {between, width()};
    Run(ctx, add);
    norm_.Rows(ctx, y, rows, y);
  } else {
    norm_.Rows(ctx, x, rows, between);
    layer_->Compute(ctx, tokens, between, y, state);
    add.b = {y, width()};
    Run(ctx, add);
  }
}

}  // namespace heed::layers
