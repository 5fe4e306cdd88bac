// The table of the long convolution for the scan engine.
#ifndef HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_
#define HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution.h"

namespace heed::long_convolution {

using scanning::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .u = {"u", "BDT", Role::kInput},
    .kernel = {"kernel", "DL", Role::kTaps, mechanism::kAnyFloat},
    .D = {.name = "D", .axes = "D", .role = Role::kSkip, .type = mechanism::kAnyFloat, .optional = true},
};
inline constexpr mechanism::NoStates<mechanism::StateTensor> kStates = {};

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::long_convolution

#endif  // HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_
