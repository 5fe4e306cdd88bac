// Linear attention on the recurrence engine: feature maps and a normaliser, no gates.
#include "heed/ops/linear/linear_attention/linear_attention.h"

#include <cmath>

#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "heed/ops/mechanism/check_internal.h"

namespace heed::linear_attention {
namespace {

using recurrence::Feature;

Feature FeatureOf(FeatureMap map) {
  switch (map) {
    case FeatureMap::kElu1: return Feature::kElu1;
    case FeatureMap::kRelu: return Feature::kRelu;
    case FeatureMap::kReluSquared: return Feature::kReluSquared;
    case FeatureMap::kExp: return Feature::kExp;
    case FeatureMap::kIdentity: return Feature::kIdentity;
    case FeatureMap::kSoftmax: return Feature::kSoftmax;
  }
  return Feature::kIdentity;
}

recurrent::Definition Checked(const char* op, const Options& options) {
  if (!(options.eps >= 0) || std::isinf(options.eps)) {
    mechanism::Fail(op, "eps", "is " + mechanism::Text(options.eps), "a finite number >= 0");
  }
  return DefinitionOf(options);
}

}  // namespace

recurrent::Definition DefinitionOf(const Options& options) {
  return {.feature = FeatureOf(options.feature_map),
          .causal = options.causal,
          .normalize = options.normalize,
          .eps = options.eps};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "linear_attention::Forward";
  recurrent::Forward(kOp, ctx, Checked(kOp, options), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  constexpr char kOp[] = "linear_attention::Backward";
  recurrent::Backward(kOp, ctx, Checked(kOp, options), in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state,
          const TensorView& o) {
  constexpr char kOp[] = "linear_attention::Step";
  if (!options.causal) mechanism::Fail(kOp, "causal", "is false", "true: one token at a time");
  recurrent::Step(kOp, ctx, Checked(kOp, options), in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "linear_attention::Workspace";
  return recurrent::Workspace(kOp, ctx, Checked(kOp, options), in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "linear_attention::BackwardWorkspace";
  return recurrent::BackwardWorkspace(kOp, ctx, Checked(kOp, options), in, options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "linear_attention::Explain";
  return recurrent::Explain(kOp, ctx, Checked(kOp, options), in, options);
}

}  // namespace heed::linear_attention
