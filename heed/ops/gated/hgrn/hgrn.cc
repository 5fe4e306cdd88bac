// HGRN on the scan engine.
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

HEED_DEFINE_RECURRENT(scanning, hgrn)

}  // namespace heed::hgrn
