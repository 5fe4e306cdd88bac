// heed.based, heed.based_backward and heed.based_step.
#include "heed/ops/linear/based/based.h"

#include "docstrings/based.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/ops/parts/recurrent_py.h"

namespace heed::based {
namespace {

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  Options own;
  own.normalize = std::get<bool>(settings.at("normalize"));
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
          .features = [](int64_t K) {
            return recurrence::FeatureSize(recurrence::Feature::kTaylor, K);
          },
          .normalizer = own.normalize};
}

}  // namespace

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "based",
                      .inputs = {"q", "k", "v"},
                      .settings = {{"normalize", true, {}}, {"eps", 1e-12, {}}},
                      .bind = &BindSettings,
                      .forward_doc = doc::kForward,
                      .backward_doc = doc::kBackward,
                      .step_doc = doc::kStep});
}

}  // namespace heed::based
