// Simple GLA on the recurrence engine: one gate per token and head.
#include "heed/ops/gated/simple_gla/simple_gla.h"

#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::simple_gla {
namespace {

constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kToken,
                                               .root_scale = true};

}  // namespace

recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("simple_gla::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("simple_gla::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  recurrent::Step("simple_gla::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("simple_gla::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("simple_gla::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("simple_gla::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::simple_gla
