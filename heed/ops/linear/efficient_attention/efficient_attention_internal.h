// Common parts of the files of efficient attention.
#ifndef HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_INTERNAL_H_
#define HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_INTERNAL_H_

#include "heed/ops/linear/efficient_attention/efficient_attention.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::efficient_attention {

// Adds the mask, which is an option, to the tensors of the table.
struct Masked : BackwardInputs {
  ConstTensorView kv_mask = {};

  Options With(Options options) const {
    options.kv_mask = kv_mask;
    return options;
  }
};
using MaskedTensor = mechanism::Tensor<Masked, Masked, Gradients>;
using Api = mechanism::ApiOf<MaskedTensor, Masked, Masked, Masked, recurrent::State, Outputs, Gradients, Explanation>;
inline constexpr MaskedTensor kTensors[] = {
    {.name = "q", .axes = "BTHK", .input = &Masked::q, .gradient = &Gradients::dq},
    {.name = "k", .axes = "BTHK", .input = &Masked::k, .gradient = &Gradients::dk},
    {.name = "v", .axes = "BTGV", .input = &Masked::v, .gradient = &Gradients::dv},
    {.name = "kv_mask", .axes = "BT", .input = &Masked::kv_mask, .values = mechanism::kMask, .optional = true},
};

// `around` must live as long as the call.
recurrent::Definition DefinitionOf(const recurrent::Surroundings* around);

// The tolerance of each output, derived in efficient_attention_reference.cc.
void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance);

}  // namespace heed::efficient_attention

#endif  // HEED_OPS_LINEAR_EFFICIENT_ATTENTION_EFFICIENT_ATTENTION_INTERNAL_H_
