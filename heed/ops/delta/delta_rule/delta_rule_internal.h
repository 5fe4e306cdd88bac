// The table of delta_rule for the recurrence engine, and the equations of its reference.
#ifndef HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/delta_rounding_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule.h"

namespace heed::delta_rule {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey, mechanism::kSame, mechanism::kUnit},
    .v = {"v", "BTGV", Role::kValue},
    .beta = {"beta", "BTG", Role::kBeta, mechanism::kWide, mechanism::kFractions},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BGFV"}};

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::delta_rule

#endif  // HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
