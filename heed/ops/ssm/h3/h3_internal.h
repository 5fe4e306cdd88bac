// The table of H3 for the scan engine.
#ifndef HEED_OPS_SSM_H3_H3_INTERNAL_H_
#define HEED_OPS_SSM_H3_H3_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/h3/h3.h"

namespace heed::h3 {

using scanning::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHd", Role::kQuery},
    .k = {"k", "BTHd", Role::kKey, mechanism::kAnyFloat},
    .v = {"v", "BTHd", Role::kValue, mechanism::kAnyFloat},
    .shift = {"shift", "DW", Role::kKeyTaps, mechanism::kAnyFloat},
    .log_dt = {"log_dt", "H", Role::kLogStep, mechanism::kAnyFloat, mechanism::kLogSteps},
    .log_A_real = {"log_A_real", "HN", Role::kLogRate, mechanism::kAnyFloat},
    .A_imag = {"A_imag", "HN", Role::kFrequency, mechanism::kAnyFloat},
    .C = {"C", "HN2", Role::kOutputWeights, mechanism::kAnyFloat},
    .D = {.name = "D", .axes = "H", .role = Role::kSkip, .type = mechanism::kAnyFloat, .optional = true},
    .shift_D = {.name = "shift_D",
                .axes = "D",
                .role = Role::kKeySkip,
                .type = mechanism::kAnyFloat,
                .optional = true,
                .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.tail = {"tail", "BwHd", mechanism::StateTensor::kTail},
                                                           .S = {"S", "BHddN2"}};

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::h3

#endif  // HEED_OPS_SSM_H3_H3_INTERNAL_H_
