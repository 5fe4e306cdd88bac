// The table of gla for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_GLA_GLA_INTERNAL_H_
#define HEED_OPS_GATED_GLA_GLA_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/gla/gla.h"

namespace heed::gla {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .log_decay_v = {.name = "log_decay_v",
                    .axes = "BTGV",
                    .role = Role::kLogValueDecay,
                    .type = mechanism::kWide,
                    .values = mechanism::kDecays,
                    .optional = true,
                    .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::gla

#endif  // HEED_OPS_GATED_GLA_GLA_INTERNAL_H_
