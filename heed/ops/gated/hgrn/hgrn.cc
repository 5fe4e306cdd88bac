// HGRN on the scan engine.
#include "heed/ops/gated/hgrn/hgrn.h"

#include "heed/ops/gated/hgrn/hgrn_internal.h"

namespace heed::hgrn {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "x", .axes = "BTD", .input = &Inputs::x, .gradient = &Gradients::dx},
    {.name = "log_decay", .axes = "BTD", .input = &Inputs::log_decay,
     .gradient = &Gradients::dlog_decay, .values = Tensor::kDecays},
};

void Place(const scanning::Call& call, const StepInputs& in, scan::Problem& p) {
  p.x = call.TokensOf(in.x);
  p.log_decay = call.TokensOf(in.log_decay);
}

void PlaceGradients(const scanning::Call& call, const Gradients& out, scan::Gradients& g) {
  g.dx = call.TokensOf(out.dx);
  g.dlog_decay = call.TokensOf(out.dlog_decay);
}

}  // namespace

scanning::Definition DefinitionOf(const Options&) {
  return {.tensors = kTensors,
          .state_axes = "BD",
          .rule = scan::Rule::kDecay,
          .flops = 2,
          .place = &Place,
          .place_gradients = &PlaceGradients};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  scanning::Forward("hgrn::Forward", ctx, DefinitionOf(options), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  scanning::Backward("hgrn::Backward", ctx, DefinitionOf(options), in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const StepState& state,
          const TensorView& o) {
  scanning::Step("hgrn::Step", ctx, DefinitionOf(options), in, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::Workspace("hgrn::Workspace", ctx, DefinitionOf(options), in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::BackwardWorkspace("hgrn::BackwardWorkspace", ctx, DefinitionOf(options), in,
                                     options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::Explain("hgrn::Explain", ctx, DefinitionOf(options), in, options);
}

}  // namespace heed::hgrn
