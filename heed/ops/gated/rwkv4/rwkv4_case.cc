// RWKV-4 in the harness.
#include <string>
#include <vector>

#include "heed/ops/gated/rwkv4/rwkv4_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::rwkv4 {
OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "rwkv4", kDefinition, {},
      {.forward =
           [](Context& ctx, const recurrent::Inputs& in, const Options& options, const recurrent::Outputs& out) {
             recurrent::Forward("rwkv4::Forward", ctx, kDefinition, in, options, out);
           },
       .backward =
           [](Context& ctx, const recurrent::BackwardInputs& in, const Options& options,
              const recurrent::Gradients& out) {
             recurrent::Backward("rwkv4::Backward", ctx, kDefinition, in, options, out);
           },
       .reference = &ReferenceOfRecurrence,
       .backward_reference = &BackwardReferenceOfRecurrence,
       .step = [](Context& ctx, const recurrent::StepInputs& in, const Options& options, const recurrent::State& state,
                  const TensorView& o) { recurrent::Step("rwkv4::Step", ctx, kDefinition, in, options, state, o); },
       .tolerance = &Tolerance,
       .backward_tolerance = &BackwardTolerance});
  OpEntry entry = recurrent::GatedEntry(mechanism, "B Tq 3 Hq size");
  entry.flops = "60 per token and channel, backward 120";
  entry.state = "B Hq 12";
  return entry;
}

}  // namespace heed::rwkv4
