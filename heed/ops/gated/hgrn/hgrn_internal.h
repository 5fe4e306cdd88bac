// The table of HGRN for the scan engine.
#ifndef HEED_OPS_GATED_HGRN_HGRN_INTERNAL_H_
#define HEED_OPS_GATED_HGRN_HGRN_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/gated/hgrn/hgrn.h"

namespace heed::hgrn {

using scanning::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .x = {"x", "BTD", Role::kInput},
    .log_decay = {"log_decay", "BTD", Role::kLogDecay, mechanism::kAnyFloat, mechanism::kDecays},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BD"}};

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::hgrn

#endif  // HEED_OPS_GATED_HGRN_HGRN_INTERNAL_H_
