// The table of kda for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_
#define HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"
#include "heed/ops/delta/kda/kda.h"

namespace heed::kda {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey, mechanism::kSame, mechanism::kUnit},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .beta = {"beta", "BTG", Role::kBeta, mechanism::kWide, mechanism::kFractions},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::kda

#endif  // HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_
