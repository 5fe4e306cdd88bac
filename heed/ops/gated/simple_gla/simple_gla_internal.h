// The table of simple_gla for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_SIMPLE_GLA_SIMPLE_GLA_INTERNAL_H_
#define HEED_OPS_GATED_SIMPLE_GLA_SIMPLE_GLA_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"

namespace heed::simple_gla {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTG", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::simple_gla

#endif  // HEED_OPS_GATED_SIMPLE_GLA_SIMPLE_GLA_INTERNAL_H_
