// Performer on the recurrence engine: random features, a normaliser, and where it is causal
// the gate of a running maximum.
#include "heed/ops/linear/performer/performer.h"

#include <cmath>

#include "heed/ops/linear/performer/performer_internal.h"
#include "heed/ops/mechanism/check_internal.h"

namespace heed::performer {
namespace {

recurrent::Definition Checked(const char* op, const Options& options) {
  if (!(options.eps >= 0) || std::isinf(options.eps)) {
    mechanism::Fail(op, "eps", "is " + mechanism::Text(options.eps), "a finite number >= 0");
  }
  return DefinitionOf(options);
}

}  // namespace

recurrent::Definition DefinitionOf(const Options& options) {
  const bool softmax = options.kernel == Kernel::kSoftmax;
  return {.root_scale = true,
          .feature = softmax ? recurrence::Feature::kRandomExp
                             : recurrence::Feature::kRandomRelu,
          .feature_eps = softmax && !options.causal ? options.eps : 0,
          .causal = options.causal,
          .normalize = true};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "performer::Forward";
  recurrent::Forward(kOp, ctx, Checked(kOp, options), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  constexpr char kOp[] = "performer::Backward";
  recurrent::Backward(kOp, ctx, Checked(kOp, options), in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state,
          const TensorView& o) {
  constexpr char kOp[] = "performer::Step";
  if (!options.causal) mechanism::Fail(kOp, "causal", "is false", "true: one token at a time");
  recurrent::Step(kOp, ctx, Checked(kOp, options), in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "performer::Workspace";
  return recurrent::Workspace(kOp, ctx, Checked(kOp, options), in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "performer::BackwardWorkspace";
  return recurrent::BackwardWorkspace(kOp, ctx, Checked(kOp, options), in, options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "performer::Explain";
  return recurrent::Explain(kOp, ctx, Checked(kOp, options), in, options);
}

}  // namespace heed::performer
