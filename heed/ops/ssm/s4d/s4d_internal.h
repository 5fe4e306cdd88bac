// The table of S4D for the scan engine.
#ifndef HEED_OPS_SSM_S4D_S4D_INTERNAL_H_
#define HEED_OPS_SSM_S4D_S4D_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/s4d/s4d.h"

namespace heed::s4d {

using scanning::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .u = {"u", "BDT", Role::kInput},
    .log_dt = {"log_dt", "D", Role::kLogStep, mechanism::kAnyFloat, mechanism::kLogSteps},
    .log_A_real = {"log_A_real", "DN", Role::kLogRate, mechanism::kAnyFloat},
    .A_imag = {"A_imag", "DN", Role::kFrequency, mechanism::kAnyFloat},
    .C = {"C", "DN2", Role::kOutputWeights, mechanism::kAnyFloat},
    .D = {.name = "D", .axes = "D", .role = Role::kSkip, .type = mechanism::kAnyFloat, .optional = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BDN2"}};

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::s4d

#endif  // HEED_OPS_SSM_S4D_S4D_INTERNAL_H_
