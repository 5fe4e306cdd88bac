// The table of Based for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_LINEAR_BASED_BASED_INTERNAL_H_
#define HEED_OPS_LINEAR_BASED_BASED_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/linear/based/based.h"

namespace heed::based {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
};
inline constexpr States<mechanism::StateTensor> kStates = {
    .S = {"S", "BGFV"},
    .z = {"z", "BGF", mechanism::StateTensor::kNormaliser},
};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::based

#endif  // HEED_OPS_LINEAR_BASED_BASED_INTERNAL_H_
