// The table of rwkv7 for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_DELTA_RWKV7_RWKV7_INTERNAL_H_
#define HEED_OPS_DELTA_RWKV7_RWKV7_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"
#include "heed/ops/delta/rwkv7/rwkv7.h"

namespace heed::rwkv7 {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .r = {"r", "BTHK", Role::kQuery},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .k = {"k", "BTHK", Role::kKey, mechanism::kSame, mechanism::kUnit},
    .v = {"v", "BTGV", Role::kValue},
    .a = {"a", "BTHK", Role::kReadKey, mechanism::kSame, mechanism::kNegativeKeys},
    .b = {"b", "BTHK", Role::kWriteKey, mechanism::kSame, mechanism::kNearlyKeys},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::rwkv7

#endif  // HEED_OPS_DELTA_RWKV7_RWKV7_INTERNAL_H_
