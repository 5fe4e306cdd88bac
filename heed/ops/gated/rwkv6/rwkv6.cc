// RWKV-6 on the recurrence engine: gates by key channel, and a bonus.
#include "heed/ops/gated/rwkv6/rwkv6.h"

#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::rwkv6 {
namespace {

constexpr recurrent::Definition kDefinition = {
    .decay = recurrent::DecayShape::kKey, .bonus = true, .query_name = "r"};

}  // namespace

recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("rwkv6::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("rwkv6::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  recurrent::Step("rwkv6::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("rwkv6::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("rwkv6::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("rwkv6::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::rwkv6
