// heed.rwkv4, heed.rwkv4_backward and heed.rwkv4_step.
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"

#include "docstrings/rwkv4.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::rwkv4 {
namespace {

recurrent::Functions BindSettings(const recurrent::Settings&) {
  return {.forward = [](Context& ctx, const recurrent::Inputs& in, const Options& options,
                        const recurrent::Outputs& out) {
            recurrent::Forward("rwkv4", ctx, kDefinition, in, options, out);
          },
          .backward = [](Context& ctx, const recurrent::BackwardInputs& in, const Options& options,
                         const recurrent::Gradients& out) {
            recurrent::Backward("rwkv4_backward", ctx, kDefinition, in, options, out);
          },
          .step = [](Context& ctx, const recurrent::StepInputs& in, const Options& options,
                     const recurrent::State& state, const TensorView& o) {
            recurrent::Step("rwkv4_step", ctx, kDefinition, in, options, state, o);
          },
          .explain = [](const Context& ctx, const recurrent::Inputs& in, const Options& options) {
            return recurrent::Explain("rwkv4", ctx, kDefinition, in, options);
          },
          .normalizer = true};
}

}  // namespace

void Bind(nanobind::module_& m) {
  using recurrent::Input;
  recurrent::Bind(m, {.name = "rwkv4",
                      .inputs = {{"k", Input::kQuery}, "v", {"log_decay", Input::kDecay}, "u"},
                      .has_maximum = true,
                      .channels = true,
                      .state_names = "num den max",
                      .bind = &BindSettings,
                      .docs = doc::kDocs});
}

}  // namespace heed::rwkv4
