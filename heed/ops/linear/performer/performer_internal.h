// The table of Performer for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_LINEAR_PERFORMER_PERFORMER_INTERNAL_H_
#define HEED_OPS_LINEAR_PERFORMER_PERFORMER_INTERNAL_H_

#include <limits>

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/linear/performer/performer.h"

namespace heed::performer {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .projection = {"projection", "MK", Role::kProjection},
};
inline constexpr States<mechanism::StateTensor> kStates = {
    .S = {"S", "BGFV"},
    .z = {"z", "BGF", mechanism::StateTensor::kNormaliser},
    .m = {"m", "BG", mechanism::StateTensor::kMaximum, -std::numeric_limits<double>::infinity()},
};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::performer

#endif  // HEED_OPS_LINEAR_PERFORMER_PERFORMER_INTERNAL_H_
