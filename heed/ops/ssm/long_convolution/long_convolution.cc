// The long convolution on the scan engine.
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {
namespace {

using scanning::StepInputs;
using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "u", .axes = "BDT", .input = &Inputs::u, .gradient = &Gradients::du},
    {.name = "kernel", .axes = "DL", .input = &Inputs::kernel, .gradient = &Gradients::dkernel},
    {.name = "D", .axes = "D", .input = &Inputs::D, .gradient = &Gradients::dD, .optional = true},
};

void Place(const scanning::Call& call, const StepInputs& in, scan::Problem& p) {
  p.x = call.TokensOf(in.u);
  p.taps = call.NumbersOf(in.kernel);
  p.skip = call.NumbersOf(in.D);
}

void PlaceGradients(const scanning::Call& call, const Gradients& out, scan::Gradients& g) {
  g.dx = call.TokensOf(out.du);
  g.dtaps = call.NumbersOf(out.dkernel);
  g.dskip = call.NumbersOf(out.dD);
}

}  // namespace

scanning::Definition DefinitionOf(const Options&) {
  return {.tensors = kTensors,
          .state_axes = "",
          .rule = scan::Rule::kTaps,
          .flops = 2,
          .place = &Place,
          .place_gradients = &PlaceGradients};
}

HEED_DEFINE_PASSES(scanning, long_convolution)

}  // namespace heed::long_convolution
