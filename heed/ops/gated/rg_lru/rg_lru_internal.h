// The table of RG-LRU for the scan engine.
#ifndef HEED_OPS_GATED_RG_LRU_RG_LRU_INTERNAL_H_
#define HEED_OPS_GATED_RG_LRU_RG_LRU_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/gated/rg_lru/rg_lru.h"

namespace heed::rg_lru {

using scanning::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .x = {"x", "BTD", Role::kInput},
    .input_gate = {"input_gate", "BTD", Role::kInputGate, mechanism::kAnyFloat},
    .recurrence_gate = {"recurrence_gate", "BTD", Role::kRecurrenceGate, mechanism::kAnyFloat},
    .a = {"a", "D", Role::kLambda, mechanism::kAnyFloat},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BD"}};

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::rg_lru

#endif  // HEED_OPS_GATED_RG_LRU_RG_LRU_INTERNAL_H_
