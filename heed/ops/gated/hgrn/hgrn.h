// HGRN: a state per channel that forgets by a gate, and is its own output.
//
//   h_t = exp(log_decay_t) h_{t-1} + x_t,  o_t = h_t
//
// Whatever makes x of a token (in the paper (1 - forget gate) times silu of a projection) is the
// caller's.
//
// Source: Qin, Yang, Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
// arXiv:2311.04823.
#ifndef HEED_OPS_GATED_HGRN_HGRN_H_
#define HEED_OPS_GATED_HGRN_HGRN_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/ops/mechanism/scanning.h"

namespace heed::hgrn {

// It takes x and log_decay; states are [B, D].
using scanning::BackwardInputs;
using scanning::Explanation;
using scanning::Gradients;
using scanning::Inputs;
using scanning::Options;
using scanning::Outputs;
using scanning::StepInputs;
using scanning::StepState;

// Computes o, and the state after the last token where it is asked for.
//
// Edges. Any of B, D and T may be 0; without tokens the state passes through. A log decay of
// -infinity forgets everything; a positive one counts as 0, unless the Context checks. A NaN
// stays in its channel.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once; states are
// f64 or f32. Decays are applied without being rounded. Subnormal results are flushed.
//
// Reproducibility. The bits depend neither on threads, batch neighbours, padding or strides,
// nor on where a sequence is split into calls.
//
// Cost. Bound by memory: two tensors are read and one is written, once. Memory beyond the
// arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range; a log decay that is
// positive or NaN is computed with, unless the Context checks. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o> and <d_final, final>. With p the gradient of h, that of
// the final state included:
//
//   p_t = d_o_t + exp(log_decay_{t+1}) p_{t+1},  dx_t = p_t
//   dlog_decay_t = p_t exp(log_decay_t) h_{t-1}
//
// Precision and reproducibility as above. States are kept every 16 tokens, the rest is computed
// again. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, with the bits of Forward; the state is read, then updated in place.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const StepState& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64, W = 64
// channels of f32 or 32 of f64, and L the tokens of the longest sequence, at most
//
//   forward   threads (96 E W + a few KiB)
//   backward  threads (E W (4 ceil(L / 16) + 128) + a few KiB) + 8 D + a few KiB
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::hgrn

#endif  // HEED_OPS_GATED_HGRN_HGRN_H_
