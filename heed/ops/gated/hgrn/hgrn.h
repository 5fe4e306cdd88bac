// HGRN: a gated recurrence per channel, whose state is the output.
//
//   h_t = exp(log_decay_t) h_{t-1} + x_t,  o_t = h_t
//
// The caller computes x of a token (in the paper (1 - forget gate) times silu of a projection).
//
// Source: Qin, Yang, Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
// arXiv:2311.04823.
#ifndef HEED_OPS_GATED_HGRN_HGRN_H_
#define HEED_OPS_GATED_HGRN_HGRN_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::hgrn {

template <class View>
struct Tensors {
  View x;          // [B, T, D]: inputs
  View log_decay;  // [B, T, D]: natural logarithms of decay factors, <= 0
};

template <class View>
struct States {
  View S;  // [B, D]: h after the last token
};

using Structs = mechanism::Structs<Tensors, States>;
using Inputs = Structs::Inputs;
using BackwardInputs = Structs::BackwardInputs;
using StepInputs = Structs::StepInputs;
using State = Structs::State;
using Summary = Structs::Summary;
using Outputs = Structs::Outputs;
using Gradients = Structs::Gradients;
using scanning::Explanation;
using scanning::Options;

// Computes o and, if requested, the state after the last token.
//
// Edges. Any of B, D and T may be 0; without tokens the final state is the initial one. A log decay of -infinity clears
// the state that it multiplies; a positive one counts as 0, unless the Context checks. A NaN stays in its channel.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. Decays are applied unrounded. Subnormal results are flushed to zero.
//
// Reproducibility. Results depend neither on the number of threads, other batch entries, padding or strides, nor on the
// split of a sequence into calls.
//
// Cost. Memory-bound: two tensors are read and one is written, once. Memory beyond the
// arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range; a positive or NaN log decay is not an
// error, unless the Context checks. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With p the gradient of h, including that of the final
// state:
//
//   p_t = d_o_t + exp(log_decay_{t+1}) p_{t+1},  dx_t = p_t
//   dlog_decay_t = p_t exp(log_decay_t) h_{t-1}
//
// Precision and reproducibility as above. States are stored every 16 tokens, the rest is recomputed. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, bitwise equal to Forward, then updates the state in place.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, W = 64
// channels of f32 or 32 of f64, and L the tokens of the longest sequence, at most
//
//   forward   threads (96 E W + a few KiB)
//   backward  threads (E W (4 ceil(L / 16) + 128) + a few KiB) + 8 D + a few KiB
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::hgrn

#endif  // HEED_OPS_GATED_HGRN_HGRN_H_
