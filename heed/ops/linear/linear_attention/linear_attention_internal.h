// The table of linear attention for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_INTERNAL_H_
#define HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/linear/linear_attention/linear_attention.h"

namespace heed::linear_attention {

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

}  // namespace heed::linear_attention

#endif  // HEED_OPS_LINEAR_LINEAR_ATTENTION_LINEAR_ATTENTION_INTERNAL_H_
