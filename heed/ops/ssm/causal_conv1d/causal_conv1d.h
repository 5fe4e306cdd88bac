// Short causal convolution: each channel is filtered on its own, over its last W tokens.
//
//   p_t = b + sum_{j < W} w_j x_{t-(W-1)+j},  y_t = act(p_t)      one w: [W] and b per channel
//
// act is the identity or silu, p / (1 + exp(-p)). Inputs before the first token are the
// state, which afterwards holds the last W - 1 inputs. It stands before the recurrences of
// Mamba, gated delta rules and their like, and gives them their nearest neighbours.
//
// Source: Gu, Dao, "Mamba", arXiv:2312.00752; names and shapes are those of the package
// causal-conv1d. The states of other libraries: README.md.
#ifndef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_H_
#define HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed::causal_conv1d {

enum class Activation { kNone, kSilu };

// B sequences, D channels, T tokens; W >= 1 taps. Any of B, D and T may be 0. Any strides:
// quick where tokens or channels are contiguous, see Forward.
struct Inputs {
  ConstTensorView x;        // [B, D, T]: what is filtered, f64, f32, bf16 or f16
  ConstTensorView weight;   // [D, W], the last tap meets the current token; x's dtype, or
                            // f32 (f64 beside f64)
  ConstTensorView bias;     // [D]: added to each channel, dtypes as weight's; absent: zeros
  ConstTensorView initial;  // [B, D, W - 1], the inputs before the first token, oldest first;
                            // f32 (f64 beside f64); absent: zeros
};

struct Options {
  Activation activation = Activation::kNone;  // of what was filtered
  ConstTensorView lengths, starts;            // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;                 // [N + 1]: N sequences one after another, B = 1; states
                                              // have N in the place of B, each sequence has its own
  bool reverse = false;                       // from the last token to the first; the final state is after the first
};

// Tokens outside of lengths, starts or cu_seqlens have o = 0.
struct Outputs {
  TensorView o;      // [B, D, T] in x's dtype
  TensorView final;  // [B, D, W - 1] as initial: inputs as they were; absent: not asked for
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;      // the shape and dtype of o
  ConstTensorView d_final;  // of the final state; absent: zero
};

// Those that are present are computed, in the shapes and dtypes of what they are the
// gradients of; zero for tokens that do not count.
struct Gradients {
  TensorView dx, dweight, dbias, dinitial;
};

// One token of each sequence.
struct StepInputs {
  ConstTensorView x;       // [B, D]
  ConstTensorView weight;  // [D, W]
  ConstTensorView bias;    // [D], or absent
};

struct Explanation {
  std::string kernel, target, why;
  double flops;             // 2 W per token and channel
  double bytes;             // inputs read once, outputs written once
  int64_t workspace_bytes;  // that the forward pass reserves, for all threads
};

// Computes o, and the state after the last token where it is asked for.
//
// Edges. Without tokens the state passes through; with fewer than W - 1, the final state
// begins with the end of the initial one. With W = 1 states are empty. A NaN among the
// inputs reaches the W tokens that see it. Absent inputs before the first token are zeros,
// which an infinite weight makes NaN.
//
// Precision. f64 is computed in f64, all else in f32: the bias, then one fused product per
// tap, the oldest first; o is rounded once. Subnormal numbers may be flushed, but states
// are copies.
//
// Reproducibility. The bits do not depend on threads, batch neighbours, padding or strides,
// nor on where a sequence is split into calls.
//
// Cost. Bound by memory: x is read once and o written once, 2 W flops for each, where
// tokens or channels are contiguous in both; any other stride is gathered element by
// element, at a fraction of that speed. Memory beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype or device disagrees with the above, if an
// output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o> and <d_final, final>. With s = 1 / (1 + exp(-p)):
//
//   dp_t = d_o_t act'(p_t)                     silu'(p) = s + p s (1 - s)
//   dx_t = sum_j w_j dp_{t+(W-1)-j}            + d_final, for the last W - 1 inputs
//   dw_j = sum_t dp_t x_{t-(W-1)+j},  db = sum_t dp_t
//
// dinitial are the dx of t < 0. p is computed again. dw and db are sums over all sequences:
// groups of 128 tokens in f32 (f64 beside f64), counted from a sequence's own first token,
// then in f64 in a fixed order; their bits do not depend on threads or strides either.
// Cost: x and d_o are read and dx is written once, 6 W flops for each. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o [B, D] of one token, with the bits of Forward. `state` [B, D, W - 1] is read,
// then updated in place: the oldest input leaves, x enters. Of the options, activation
// alone. Bound by the memory of the weights and the state.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads. With E = 4, or 8 for f64, at
// most
//
//   forward   E (W + 1) (D + 64) + threads 272 E (2 W + 18)
//   backward  E (W + 1) (D + 64) + threads 272 E (4 W + 265)
//             + min(32, n) 8 (W + 1) (D + 64)
//
// where n counts runs of 1024 tokens of all sequences.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::causal_conv1d

#endif  // HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_H_
