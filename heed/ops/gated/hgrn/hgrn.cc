// HGRN on the scan engine.
#include "heed/ops/gated/hgrn/hgrn_internal.h"

namespace heed::hgrn {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "x", .axes = "BTD", .input = &Inputs::x, .gradient = &Gradients::dx},
    {.name = "log_decay",
     .axes = "BTD",
     .input = &Inputs::log_decay,
     .gradient = &Gradients::dlog_decay,
     .values = Tensor::kDecays},
};

}  // namespace

scanning::Definition DefinitionOf(const Options&) {
  return {.tensors = kTensors, .state_axes = "BD", .rule = scan::Rule::kDecay, .flops = 2};
}

HEED_DEFINE_RECURRENT(scanning, hgrn)

}  // namespace heed::hgrn
