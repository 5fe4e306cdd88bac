// The table of hgrn2 for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_HGRN2_HGRN2_INTERNAL_H_
#define HEED_OPS_GATED_HGRN2_HGRN2_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/hgrn2/hgrn2.h"

namespace heed::hgrn2 {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .i = {"i", "BTGV", Role::kValue},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::hgrn2

#endif  // HEED_OPS_GATED_HGRN2_HGRN2_INTERNAL_H_
