// Mlp: two products and an activation.
#include "heed/layers/mlp.h"

#include <vector>

#include "heed/layers/arena_internal.h"
#include "heed/layers/rows_internal.h"

namespace heed::layers {

Mlp::Mlp(const Config& config, const Weights& weights) : Layer("layers::Mlp", config.width), config_(config) {
  CheckConfig(name(), "inner", config.inner);
  std::vector<LinearName> first;
  if (!config.names.gate.empty()) first.push_back({config.names.gate, config.inner, config.bias});
  first.push_back({config.names.up, config.inner, config.bias});
  up_ = weights.Matrix(first, config.width, config.names.transposed);
  down_ = weights.Matrix({config.names.down, config.width, config.bias}, config.inner, config.names.transposed);
}

State Mlp::MakeState(const StateOptions& options) const { return State(name(), options.batch); }

void Mlp::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State*) const {
  const int64_t rows = tokens.rows(), inner = config_.inner;
  const bool gated = !config_.names.gate.empty();
  const int64_t both = gated ? 2 * inner : inner;
  Frame frame;
  float* projected = frame.Floats(rows * both);
  up_.Rows(ctx, x, width(), rows, projected, both);
  ActivateRows call;
  call.activation = config_.activation;
  call.x = {projected, both};
  if (gated) call.factor = {projected + inner, both};
  call.y = {projected, both};  // in place: the product reads rows with a stride
  call.rows = static_cast<size_t>(rows);
  call.size = static_cast<size_t>(inner);
  Run(ctx, call);
  down_.Rows(ctx, projected, both, rows, y, width());
}

}  // namespace heed::layers
