// The selective scan on the scan engine.
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

namespace heed::selective_scan {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "u", .axes = "BDT", .input = &Inputs::u, .gradient = &Gradients::du},
    {.name = "delta", .axes = "BDT", .input = &Inputs::delta, .gradient = &Gradients::ddelta, .values = Tensor::kSteps},
    {.name = "A", .axes = "DN", .input = &Inputs::A, .gradient = &Gradients::dA, .values = Tensor::kRates},
    {.name = "B", .axes = "BGNT|BNT|DN", .input = &Inputs::B, .gradient = &Gradients::dB},
    {.name = "C", .axes = "BGNT|BNT|DN", .input = &Inputs::C, .gradient = &Gradients::dC},
    {.name = "D", .axes = "D", .input = &Inputs::D, .gradient = &Gradients::dD, .optional = true},
    {.name = "z", .axes = "BDT", .input = &Inputs::z, .gradient = &Gradients::dz, .optional = true},
    {.name = "delta_bias",
     .axes = "D",
     .input = &Inputs::delta_bias,
     .gradient = &Gradients::ddelta_bias,
     .values = Tensor::kStepBiases,
     .optional = true},
};

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.tensors = kTensors,
          .state_axes = "BDN",
          .rule = scan::Rule::kSelective,
          .flops = 7,
          .softplus = options.delta_softplus};
}

HEED_DEFINE_RECURRENT(scanning, selective_scan)

}  // namespace heed::selective_scan
