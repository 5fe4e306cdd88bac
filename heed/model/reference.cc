// Whole models in double: the layers' references, one after the other.
#include <utility>

#include "heed/layers/reference_internal.h"
#include "heed/model/plan_internal.h"

namespace heed::model {

using layers::reference::Array;

namespace {

Array Normed(const NamedNorm& norm, const layers::Weights& weights, const Array& x) {
  const Array flat = x.Reshaped({x.rows(), x.last()});
  Array y(flat.sizes);
  layers::Norm::Reference(norm.config, weights.At(norm.name + "."), flat.view(), y.view());
  return y.Reshaped(x.sizes);
}

}  // namespace

void Reference(const Plan& plan, const layers::Weights& weights, const std::optional<layers::Weights>& head,
               const ConstTensorView& ids, const layers::Call& call, const TensorView& y) {
  const int64_t B = ids.size(0), T = ids.size(1), width = plan.width;
  const auto table = [&](const std::string& name, int64_t count) {
    return layers::reference::Tensor(weights, name + ".weight", {count, width});
  };
  const Array tokens = table(plan.tokens, plan.vocabulary);
  Array x({B, T, width});
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t c = 0; c < width; ++c) x[(b * T + t) * width + c] = tokens[ids.as<int64_t>()[b * T + t] * width + c];
    }
  }
  const auto add = [&](const Array& rows, int64_t step) {
    for (int64_t i = 0; i < B * T * width; ++i) x[i] += rows[i / width % T * step * width + i % width];
  };
  if (!plan.positions.empty()) add(table(plan.positions, plan.most_positions), 1);
  if (!plan.types.empty()) add(table(plan.types, plan.type_count), 0);
  if (plan.embedding_norm) x = Normed(*plan.embedding_norm, weights, x);
  for (const Block& block : plan.blocks) {
    Array out(x.sizes);
    block.reference(weights, std::as_const(x).view(), call, out.view());
    x = layers::reference::Map(out, [&](double value) { return value * block.factor; });
  }
  if (plan.final_norm) x = Normed(*plan.final_norm, weights, x);
  if (!head) return x.Store(y);
  const Array matrix = layers::reference::Tensor(*head, "weight", {plan.vocabulary, width});
  Array logits({B, T, plan.vocabulary});
  for (int64_t row = 0; row < B * T; ++row) {
    for (int64_t i = 0; i < plan.vocabulary; ++i) {
      for (int64_t c = 0; c < width; ++c)
        logits[row * plan.vocabulary + i] += x[row * width + c] * matrix[i * width + c];
    }
  }
  logits.Store(y);
}

}  // namespace heed::model
