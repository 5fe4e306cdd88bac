// The table of gdn2 for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_
#define HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"
#include "heed/ops/delta/gdn2/gdn2.h"

namespace heed::gdn2 {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey, mechanism::kSame, mechanism::kUnit},
    .v = {"v", "BTGV", Role::kValue},
    .log_decay = {"log_decay", "BTGK", Role::kLogDecay, mechanism::kWide, mechanism::kDecays},
    .erase = {"erase", "BTGK", Role::kErase, mechanism::kWide, mechanism::kFractions},
    .write = {"write", "BTGV", Role::kWrite, mechanism::kWide, mechanism::kFractions},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::gdn2

#endif  // HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_
