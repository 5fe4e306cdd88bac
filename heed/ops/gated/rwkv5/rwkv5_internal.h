// The table of rwkv5 for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_RWKV5_RWKV5_INTERNAL_H_
#define HEED_OPS_GATED_RWKV5_RWKV5_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/rwkv5/rwkv5.h"

namespace heed::rwkv5 {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .r = {"r", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "GK", Role::kLogDecay, mechanism::kAnyFloat, mechanism::kDecays},
    .u = {"u", "GK", Role::kBonus, mechanism::kAnyFloat},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::rwkv5

#endif  // HEED_OPS_GATED_RWKV5_RWKV5_INTERNAL_H_
