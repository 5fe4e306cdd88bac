// The table of RWKV-4 for the recurrence engine, and the tolerances of its reference.
#ifndef HEED_OPS_GATED_RWKV4_RWKV4_INTERNAL_H_
#define HEED_OPS_GATED_RWKV4_RWKV4_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/ops/gated/rwkv4/rwkv4.h"

namespace heed::rwkv4 {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .k = {"k", "BTC", Role::kKey},
    .v = {"v", "BTC", Role::kValue},
    .log_decay = {"log_decay", "C", Role::kLogDecay, mechanism::kAnyFloat, mechanism::kDecays},
    .u = {"u", "C", Role::kBonus, mechanism::kAnyFloat},
};
inline constexpr States<mechanism::StateTensor> kStates = {
    .num = {"num", "BC"},
    .den = {"den", "BC", mechanism::StateTensor::kNormaliser},
    .max = {"max", "BC", mechanism::StateTensor::kMaximum, -1e38f},
};

recurrent::Definition DefinitionOf(const Options& options);

// The tolerance of each output, derived in the .cc file.
void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance);

}  // namespace heed::rwkv4

#endif  // HEED_OPS_GATED_RWKV4_RWKV4_INTERNAL_H_
