// DeltaProduct on the recurrence engine.
#include "heed/ops/delta/delta_product/delta_product_internal.h"

namespace heed::delta_product {

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("delta_product::Forward", ctx, kDefinition, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  recurrent::Backward("delta_product::Backward", ctx, kDefinition, in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state,
          const TensorView& o) {
  recurrent::Step("delta_product::Step", ctx, kDefinition, in, options, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("delta_product::Workspace", ctx, kDefinition, in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("delta_product::BackwardWorkspace", ctx, kDefinition, in,
                                      options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("delta_product::Explain", ctx, kDefinition, in, options);
}

}  // namespace heed::delta_product
