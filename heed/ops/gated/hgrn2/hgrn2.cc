// HGRN2 on the recurrence engine: gates by key channel, which are keys too.
#include "heed/ops/gated/hgrn2/hgrn2.h"

#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::hgrn2 {
namespace {

constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kKey,
                                               .root_scale = true,
                                               .complement_keys = true,
                                               .value_name = "i"};

}  // namespace

recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("hgrn2::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("hgrn2::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  recurrent::Step("hgrn2::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("hgrn2::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("hgrn2::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("hgrn2::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::hgrn2
