// RG-LRU, the recurrence of Griffin: a gated recurrence per channel, whose state is the output.
//
//   log a_t = -c sigmoid(r_t) softplus(a)         r: recurrence_gate, i: input_gate
//   h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t,  o_t = h_t
//
// The first token of a sequence without an initial state has a factor of 1 instead of the root: an absent state differs
// from a state of zeros.
//
// Source: De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
// Language Models", arXiv:2402.19427.
#ifndef HEED_OPS_GATED_RG_LRU_RG_LRU_H_
#define HEED_OPS_GATED_RG_LRU_RG_LRU_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::rg_lru {

template <class View>
struct Tensors {
  View x;                // [B, T, D]: inputs
  View input_gate;       // [B, T, D]: the input gate before its sigmoid
  View recurrence_gate;  // [B, T, D]: the recurrence gate before its sigmoid
  View a;                // [D]: parameter of the decay, exp(-c softplus(a)) at the largest gate
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

struct Options : scanning::Options {
  double c = 8;  // factor of softplus(a) in the log decay: positive, finite
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any of B, D and T may be 0; without tokens the final state is the initial one. A NaN stays
// in its channel.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once; states are
// f64 or f32. Decays are applied unrounded, and 1 - a^2 is computed without cancellation. Subnormal results are flushed
// to zero.
//
// Reproducibility. Results depend neither on the number of threads, other batch entries, padding or strides, nor on the
// split of a sequence into calls.
//
// Cost. Three exponentials per token and channel, three tensors read and one written. Memory beyond
// the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, if lengths, starts or cu_seqlens are out of range, or if c is
// not a positive number. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With p the gradient of h, including that of the final
// state:
//
//   p_t      = d_o_t + a_{t+1} p_{t+1}
//   dlog a_t = p_t (a_t h_{t-1} - sigmoid(i_t) x_t a_t^2 / sqrt(1 - a_t^2))
//
// and from these the gradients of x, of both gates and of a. As in the paper's code the derivative of sqrt is limited
// to 1000; at a first token without a state the root does not depend on a. da is summed over groups of 128 tokens in
// f32 (f64 for f64), counted from a sequence's first token, then in f64 in a fixed order. Precision and
// reproducibility as above, except that da of a split sequence agrees up to rounding. States are stored every 16
// tokens, the rest is recomputed. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o of one token, bitwise equal to Forward, then updates the state in place. Only the option c has an effect.
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

}  // namespace heed::rg_lru

#endif  // HEED_OPS_GATED_RG_LRU_RG_LRU_H_
