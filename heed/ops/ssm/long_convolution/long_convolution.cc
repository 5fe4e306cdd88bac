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

}  // namespace

scanning::Definition DefinitionOf(const Options&) {
  return {.tensors = kTensors, .state_axes = "", .rule = scan::Rule::kTaps, .flops = 2};
}

HEED_DEFINE_PASSES(scanning, long_convolution)

}  // namespace heed::long_convolution
