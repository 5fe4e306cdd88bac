// heed.performer, heed.performer_backward and heed.performer_step.
#include "heed/ops/linear/performer/performer.h"

#include <string>

#include "docstrings/performer.h"
#include "heed/ops/parts/recurrent_py.h"

namespace heed::performer {
namespace {

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  Options own;
  own.causal = std::get<bool>(settings.at("causal"));
  own.kernel = std::get<std::string>(settings.at("kernel")) == "relu" ? Kernel::kRelu
                                                                      : Kernel::kSoftmax;
  own.eps = std::get<double>(settings.at("eps"));
  const auto with = [own](const recurrent::Options& common) {
    Options options = own;
    static_cast<recurrent::Options&>(options) = common;
    return options;
  };
  using Common = recurrent::Options;
  return {.forward = [with](Context& ctx, const Inputs& in, const Common& options,
                            const Outputs& out) { Forward(ctx, in, with(options), out); },
          .backward = [with](Context& ctx, const BackwardInputs& in, const Common& options,
                             const Gradients& out) { Backward(ctx, in, with(options), out); },
          .step = [with](Context& ctx, const StepInputs& in, const Common& options,
                         const State& state,
                         const TensorView& o) { Step(ctx, in, with(options), state, o); },
          .explain = [with](const Context& ctx, const Inputs& in,
                            const Common& options) { return Explain(ctx, in, with(options)); },
          .normalizer = true};
}

}  // namespace

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "performer",
                      .inputs = {"q", "k", "v", "projection"},
                      .settings = {{"causal", false, {}},
                                   {"kernel", std::string("softmax"), {"softmax", "relu"}},
                                   {"eps", 1e-4, {}}},
                      .bind = &BindSettings,
                      .forward_doc = doc::kForward,
                      .backward_doc = doc::kBackward,
                      .step_doc = doc::kStep});
}

}  // namespace heed::performer
