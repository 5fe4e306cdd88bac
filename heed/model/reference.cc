// References of whole models in double: the layers' references, one after the other.
#include <algorithm>
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

void Reference(const Plan& plan, const layers::Weights& weights, const layers::Weights& body,
               const std::optional<HeadNames>& head, const ConstTensorView& ids, const layers::Call& call,
               const TensorView& y) {
  const int64_t B = ids.size(0), T = ids.size(1), width = plan.width;
  const auto table = [&](const std::string& name, int64_t count) {
    return layers::reference::Tensor(body, name + ".weight", {count, width});
  };
  const Array tokens = table(plan.tokens, plan.vocabulary);
  Array x({B, T, width});
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t c = 0; c < width; ++c) x[(b * T + t) * width + c] = tokens[ids.as<int64_t>()[b * T + t] * width + c];
    }
  }
  if (!plan.before.empty()) {
    const Array before = table(plan.before, plan.vocabulary);
    for (int64_t i = 0; i < B * T * width; ++i) {
      const int64_t row = i / width;
      if (row % T != 0) x[i] += before[ids.as<int64_t>()[row - 1] * width + i % width];
    }
  }
  // Adds row row_of(b, t) of the table to every token.
  const auto add = [&](const Array& rows, const auto& row_of) {
    for (int64_t i = 0; i < B * T * width; ++i) x[i] += rows[row_of(i / width / T, i / width % T) * width + i % width];
  };
  if (!plan.positions.empty()) {
    add(table(plan.positions, plan.most_positions), [&](int64_t b, int64_t t) {
      if (!plan.padding) return t;
      const int64_t* sequence = ids.as<int64_t>() + b * T;
      if (sequence[t] == *plan.padding) return *plan.padding;
      return *plan.padding + t + 1 - std::count(sequence, sequence + t, *plan.padding);
    });
  }
  if (!plan.types.empty()) add(table(plan.types, plan.type_count), [](int64_t, int64_t) { return int64_t{0}; });
  if (plan.embedding_norm) x = Normed(*plan.embedding_norm, body, x);
  for (const Block& block : plan.blocks) {
    Array out(x.sizes);
    block.reference(body, std::as_const(x).view(), call, out.view());
    x = layers::reference::Map(out, [&](double value) { return value * block.factor; });
  }
  if (plan.final_norm) x = Normed(*plan.final_norm, body, x);
  if (!head) return x.Store(y);
  if (const auto& transform = plan.transform) {
    x = layers::reference::Product(x, weights, {transform->dense, width, true});
    x = layers::reference::Map(x, [&](double v) { return layers::ActivationReference(transform->activation, v); });
    x = Normed(transform->norm, weights, x);
  }
  const Array matrix = layers::reference::Tensor(weights, head->weight, {plan.vocabulary, width});
  Array bias({plan.vocabulary});
  if (!head->bias.empty()) bias = layers::reference::Tensor(weights, head->bias, {plan.vocabulary});
  Array logits({B, T, plan.vocabulary});
  for (int64_t row = 0; row < B * T; ++row) {
    for (int64_t i = 0; i < plan.vocabulary; ++i) {
      logits[row * plan.vocabulary + i] = bias[i];
      for (int64_t c = 0; c < width; ++c)
        logits[row * plan.vocabulary + i] += x[row * width + c] * matrix[i * width + c];
    }
  }
  logits.Store(y);
}

}  // namespace heed::model
