// The table of lightning for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_LIGHTNING_LIGHTNING_INTERNAL_H_
#define HEED_OPS_GATED_LIGHTNING_LIGHTNING_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/lightning/lightning.h"

namespace heed::lightning {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "G", Role::kLogDecay, mechanism::kAnyFloat, mechanism::kDecays},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::lightning

#endif  // HEED_OPS_GATED_LIGHTNING_LIGHTNING_INTERNAL_H_
