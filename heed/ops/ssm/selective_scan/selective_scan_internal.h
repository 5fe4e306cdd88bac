// The table of the selective scan for the scan engine.
#ifndef HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_INTERNAL_H_
#define HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"

namespace heed::selective_scan {

using scanning::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .u = {"u", "BDT", Role::kInput},
    .delta = {"delta", "BDT", Role::kStep, mechanism::kAnyFloat, mechanism::kSteps},
    .A = {"A", "DN", Role::kRate, mechanism::kAnyFloat, mechanism::kRates},
    .B = {"B", "BGNT|BNT|DN", Role::kInputWeights, mechanism::kAnyFloat},
    .C = {"C", "BGNT|BNT|DN", Role::kOutputWeights, mechanism::kAnyFloat},
    .D = {.name = "D", .axes = "D", .role = Role::kSkip, .type = mechanism::kAnyFloat, .optional = true},
    .z = {.name = "z", .axes = "BDT", .role = Role::kOutputGate, .type = mechanism::kAnyFloat, .optional = true},
    .delta_bias = {.name = "delta_bias",
                   .axes = "D",
                   .role = Role::kStepBias,
                   .type = mechanism::kAnyFloat,
                   .values = mechanism::kStepBiases,
                   .optional = true,
                   .keyword = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.S = {"S", "BDN"}};

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::selective_scan

#endif  // HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_INTERNAL_H_
