// RWKV-5 on the recurrence engine: constant decays by key channel, and a bonus.
#include "heed/ops/gated/rwkv5/rwkv5.h"

#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::rwkv5 {
namespace {

constexpr recurrent::Definition kDefinition = {
    .decay = recurrent::DecayShape::kHeadKey, .bonus = true, .query_name = "r"};

}  // namespace

recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("rwkv5::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("rwkv5::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  recurrent::Step("rwkv5::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("rwkv5::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("rwkv5::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("rwkv5::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::rwkv5
