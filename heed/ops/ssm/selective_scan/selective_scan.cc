// The selective scan on the scan engine.
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

namespace heed::selective_scan {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "u", .axes = "BDT", .input = &Inputs::u, .gradient = &Gradients::du},
    {.name = "delta", .axes = "BDT", .input = &Inputs::delta, .gradient = &Gradients::ddelta,
     .values = Tensor::kSteps},
    {.name = "A", .axes = "DN", .input = &Inputs::A, .gradient = &Gradients::dA,
     .values = Tensor::kRates},
    {.name = "B", .axes = "BGNT|BNT|DN", .input = &Inputs::B, .gradient = &Gradients::dB},
    {.name = "C", .axes = "BGNT|BNT|DN", .input = &Inputs::C, .gradient = &Gradients::dC},
    {.name = "D", .axes = "D", .input = &Inputs::D, .gradient = &Gradients::dD, .optional = true},
    {.name = "z", .axes = "BDT", .input = &Inputs::z, .gradient = &Gradients::dz,
     .optional = true},
    {.name = "delta_bias", .axes = "D", .input = &Inputs::delta_bias,
     .gradient = &Gradients::ddelta_bias, .values = Tensor::kStepBiases, .optional = true},
};

void Place(const scanning::Call& call, const StepInputs& in, scan::Problem& p) {
  p.x = call.TokensOf(in.u);
  p.delta = call.TokensOf(in.delta);
  p.gate = call.TokensOf(in.z);
  p.A = call.NumbersOf(in.A);
  p.bias = call.NumbersOf(in.delta_bias);
  p.skip = call.NumbersOf(in.D);
  p.B = call.WeightsOf(in.B);
  p.C = call.WeightsOf(in.C);
}

void PlaceGradients(const scanning::Call& call, const Gradients& out, scan::Gradients& g) {
  g.dx = call.TokensOf(out.du);
  g.ddelta = call.TokensOf(out.ddelta);
  g.dgate = call.TokensOf(out.dz);
  g.dA = call.NumbersOf(out.dA);
  g.dbias = call.NumbersOf(out.ddelta_bias);
  g.dskip = call.NumbersOf(out.dD);
  g.dB = call.WeightsOf(out.dB);
  g.dC = call.WeightsOf(out.dC);
}

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.tensors = kTensors,
          .state_axes = "BDN",
          .rule = scan::Rule::kSelective,
          .flops = 7,
          .place = &Place,
          .place_gradients = &PlaceGradients,
          .softplus = options.delta_softplus};
}

HEED_DEFINE_RECURRENT(scanning, selective_scan)

}  // namespace heed::selective_scan
