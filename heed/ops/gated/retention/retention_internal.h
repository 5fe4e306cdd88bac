// The table of retention for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_RETENTION_RETENTION_INTERNAL_H_
#define HEED_OPS_GATED_RETENTION_RETENTION_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/retention/retention.h"

namespace heed::retention {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {.name = "log_decay",
                  .axes = "G",
                  .role = Role::kLogDecay,
                  .type = mechanism::kAnyFloat,
                  .values = mechanism::kDecays,
                  .optional = true,
                  .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::retention

#endif  // HEED_OPS_GATED_RETENTION_RETENTION_INTERNAL_H_
