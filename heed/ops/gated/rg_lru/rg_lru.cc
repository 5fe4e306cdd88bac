// RG-LRU on the scan engine.
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"

namespace heed::rg_lru {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "x", .axes = "BTD", .input = &Inputs::x, .gradient = &Gradients::dx},
    {.name = "input_gate", .axes = "BTD", .input = &Inputs::input_gate, .gradient = &Gradients::dinput_gate},
    {.name = "recurrence_gate",
     .axes = "BTD",
     .input = &Inputs::recurrence_gate,
     .gradient = &Gradients::drecurrence_gate},
    {.name = "a", .axes = "D", .input = &Inputs::a, .gradient = &Gradients::da},
};

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.tensors = kTensors, .state_axes = "BD", .rule = scan::Rule::kGates, .flops = 30, .c = options.c};
}

HEED_DEFINE_RECURRENT(scanning, rg_lru)

}  // namespace heed::rg_lru
