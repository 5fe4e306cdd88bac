// Bindings of heed.rwkv4, heed.rwkv4_backward and heed.rwkv4_step: the recurrence over channels, in the engine's form.
#include "docstrings/rwkv4.h"
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::rwkv4 {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(
      m,
      {.name = "rwkv4",
       .docs = doc::kDocs,
       .in_python = {{"initial_state",
                      "the state before the first token: num, den and max, [B, C] each; f32, "
                      "or f64 for f64; absent: none so far"}}},
      kDefinition,
      {.forward =
           [](Context& ctx, const recurrent::Inputs& in, const Options& options, const recurrent::Outputs& out) {
             recurrent::Forward("rwkv4", ctx, kDefinition, in, options, out);
           },
       .backward =
           [](Context& ctx, const recurrent::BackwardInputs& in, const Options& options,
              const recurrent::Gradients& out) {
             recurrent::Backward("rwkv4_backward", ctx, kDefinition, in, options, out);
           },
       .step = [](Context& ctx, const recurrent::StepInputs& in, const Options& options, const recurrent::State& state,
                  const TensorView& o) { recurrent::Step("rwkv4_step", ctx, kDefinition, in, options, state, o); },
       .explain = [](const Context& ctx, const recurrent::Inputs& in,
                     const Options& options) { return recurrent::Explain("rwkv4", ctx, kDefinition, in, options); }});
}

}  // namespace heed::rwkv4
