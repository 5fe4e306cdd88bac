// Short causal convolution: a filter over the last W tokens of each channel (depthwise).
//
//   p_t = b + sum_{j < W} w_j x_{t-(W-1)+j},  y_t = act(p_t)      one w: [W] and b per channel
//
// act is the identity or silu, p / (1 + exp(-p)). Inputs before the first token are the state, which afterwards holds
// the last W - 1 inputs. Mamba, gated delta rules and similar models apply it before their recurrence to mix adjacent
// tokens.
//
// Sizes: B sequences, D channels, T tokens; W taps, at least 1. Any strides: fast where tokens or channels are
// contiguous, see Forward. An absent initial state is zeros, and an absent final state is not computed. Tokens outside
// lengths, starts or cu_seqlens have o = 0.
//
// Source: Gu, Dao, "Mamba", arXiv:2312.00752; names and shapes are those of the package
// causal-conv1d. The states of other libraries: README.md.
#ifndef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_H_
#define HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/mechanism/scanning.h"

namespace heed::causal_conv1d {

template <class View>
struct Tensors {
  View x;          // [B, D, T]: input, f64, f32, bf16 or f16
  View weight;     // [D, W]: taps, the last one of the current token; x's dtype, or f32 (f64 if x is f64)
  View bias = {};  // [D]: added to each channel, dtypes as for weight; absent: zeros
};

template <class View>
struct States {
  View inputs;  // [B, D, W - 1]: the last inputs, unrounded, oldest first; f32 (f64 if x is f64)
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

enum class Activation { kNone, kSilu };

struct Options : scanning::Options {
  Activation activation = Activation::kNone;  // applied to the output of the filter
};

// Computes o and, if requested, the state after the last token.
//
// Edges. Any of B, D and T may be 0. Without tokens the final state is the initial one; with fewer than W - 1, it
// begins with the end of the initial one. With W = 1 states are empty. A NaN in an input propagates to the W tokens
// that see it. Absent inputs before the first token are zeros, which times an infinite weight are NaN.
//
// Precision. f64 is computed in f64, other dtypes in f32: the bias, then one fused multiply-add per tap, oldest first;
// o is rounded once. Subnormal numbers may be flushed to zero, but states are copies.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides,
// nor on the split of a sequence into calls.
//
// Cost. Memory-bound: x is read once and o written once, with 2 W flops per element, where tokens or channels are
// contiguous in both; other strides are gathered element by element, at a fraction of that speed. Memory beyond the
// arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes the gradients of sum <d_o, o> + <d_final, final>. With s = 1 / (1 + exp(-p)):
//
//   dp_t = d_o_t act'(p_t)                     silu'(p) = s + p s (1 - s)
//   dx_t = sum_j w_j dp_{t+(W-1)-j}            + d_final, for the last W - 1 inputs
//   dw_j = sum_t dp_t x_{t-(W-1)+j},  db = sum_t dp_t
//
// The gradient of the initial state is dx at t < 0. p is recomputed. dw and db are sums over all sequences: groups of
// 128 tokens in f32 (f64 for f64), counted from a sequence's first token, then in f64 in a fixed order; their bits do
// not depend on threads or strides either. Cost: x and d_o are read and dx is written once, with 6 W flops per element.
// Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o [B, D] of one token, bitwise equal to Forward. The state is updated in place: the oldest input leaves, x
// enters. Only the option activation has an effect. Memory-bound by the weights and the state.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// The segment of these tokens as a map of states, see mechanism/structs.h.
HEED_API void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out);
HEED_API void Compose(const Summary& left, const Summary& right, const Summary& out);
HEED_API void Apply(const Summary& segment, const State& before, const State& after);
HEED_API void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before);

// Bytes that the passes reserve in `ctx`, for all threads. With E = 4, or 8 for f64, at
// most
//
//   forward   E (W + 1) (D + 64) + threads 272 E (2 W + 18)
//   backward  E (W + 1) (D + 64) + threads 272 E (4 W + 265)
//             + min(32, n) 8 (W + 1) (D + 64)
//
// where n counts runs of 1024 tokens of all sequences.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::causal_conv1d

#endif  // HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_H_
