// The table of mLSTM for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_GATED_MLSTM_MLSTM_INTERNAL_H_
#define HEED_OPS_GATED_MLSTM_MLSTM_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"
#include "heed/ops/gated/mlstm/mlstm.h"

namespace heed::mlstm {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .i = {"i", "BTG", Role::kInputGate, mechanism::kWide},
    .f = {"f", "BTG", Role::kForgetGate, mechanism::kWide, mechanism::kOpenGates},
};
inline constexpr States<mechanism::StateTensor> kStates = {
    .S = {"S", "BGFV"},
    .z = {"z", "BGF", mechanism::StateTensor::kNormaliser},
    .m = {"m", "BG", mechanism::StateTensor::kMaximum},
};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::mlstm

#endif  // HEED_OPS_GATED_MLSTM_MLSTM_INTERNAL_H_
