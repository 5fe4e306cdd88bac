// GLA on the recurrence engine: gates by key channel.
#include "heed/ops/gated/gla/gla.h"

#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::gla {
namespace {

constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kKey,
                                               .root_scale = true,
                                               .value_decay = true};

}  // namespace

recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("gla::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("gla::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  recurrent::Step("gla::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("gla::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("gla::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("gla::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::gla
