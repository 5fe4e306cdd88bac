// Based on the recurrence engine: a feature map and a normaliser, no gates.
#include "heed/ops/linear/based/based.h"

#include <cmath>

#include "heed/ops/linear/based/based_internal.h"
#include "heed/ops/mechanism/check_internal.h"

namespace heed::based {
namespace {

recurrent::Definition Checked(const char* op, const Options& options) {
  if (!(options.eps >= 0) || std::isinf(options.eps)) {
    mechanism::Fail(op, "eps", "is " + mechanism::Text(options.eps), "a finite number >= 0");
  }
  return DefinitionOf(options);
}

}  // namespace

recurrent::Definition DefinitionOf(const Options& options) {
  return {.root_scale = true,
          .feature = recurrence::Feature::kTaylor,
          .normalize = options.normalize,
          .eps = options.eps};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "based::Forward";
  recurrent::Forward(kOp, ctx, Checked(kOp, options), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  constexpr char kOp[] = "based::Backward";
  recurrent::Backward(kOp, ctx, Checked(kOp, options), in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state,
          const TensorView& o) {
  constexpr char kOp[] = "based::Step";
  recurrent::Step(kOp, ctx, Checked(kOp, options), in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "based::Workspace";
  return recurrent::Workspace(kOp, ctx, Checked(kOp, options), in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "based::BackwardWorkspace";
  return recurrent::BackwardWorkspace(kOp, ctx, Checked(kOp, options), in, options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "based::Explain";
  return recurrent::Explain(kOp, ctx, Checked(kOp, options), in, options);
}

}  // namespace heed::based
