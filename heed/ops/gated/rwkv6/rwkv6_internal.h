// The table of rwkv6 for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_RWKV6_RWKV6_INTERNAL_H_
#define HEED_OPS_GATED_RWKV6_RWKV6_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/rwkv6/rwkv6.h"

namespace heed::rwkv6 {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .r = {"r", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .u = {"u", "GK", Role::kBonus, mechanism::kAnyFloat},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::rwkv6

#endif  // HEED_OPS_GATED_RWKV6_RWKV6_INTERNAL_H_
