// Lightning attention on the recurrence engine: one constant gate per head.
#include "heed/ops/gated/lightning/lightning.h"

#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::lightning {
namespace {

constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kHead,
                                               .root_scale = true};

}  // namespace

recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("lightning::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("lightning::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  recurrent::Step("lightning::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("lightning::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("lightning::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("lightning::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::lightning
