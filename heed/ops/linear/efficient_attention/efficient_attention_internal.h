// The table of efficient attention for the recurrence engine, and the tolerances of its kernels.
#ifndef HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_INTERNAL_H_
#define HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_INTERNAL_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/ops/linear/efficient_attention/efficient_attention.h"

namespace heed::efficient_attention {

using recurrent::Role;

inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .q = {"q", "BTHK", Role::kQuery},
    .k = {"k", "BTHK", Role::kKey},
    .v = {"v", "BTGV", Role::kValue},
    .kv_mask = {.name = "kv_mask",
                .axes = "BT",
                .role = Role::kKeyMask,
                .values = mechanism::kMask,
                .optional = true,
                .keyword = true},
};
inline constexpr mechanism::NoStates<mechanism::StateTensor> kStates = {};

recurrent::Definition DefinitionOf(const Options& options);

// The tolerance of each output, derived in efficient_attention_reference.cc.
void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance);

}  // namespace heed::efficient_attention

#endif  // HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_INTERNAL_H_
