// RWKV-4's time mixing: a mean per channel, whose weights fade with distance.
//
//   o_t = (sum_{s < t} e^{(t - 1 - s) w + k_s} v_s + e^{u + k_t} v_t)
//         / (sum_{s < t} e^{(t - 1 - s) w + k_s} + e^{u + k_t})
//
// with w = log_decay <= 0 and the bonus u of the present token, one number each per channel. The
// sums are kept relative to a running maximum, so that keys may be of any size:
//
//   max_t = max(max_{t-1} + w, k_t)
//   num_t = e^{max_{t-1} + w - max_t} num_{t-1} + e^{k_t - max_t} v_t,  den_t likewise with v = 1
//
// Source: Peng, Alcaide, Anthony et al., "RWKV: Reinventing RNNs for the Transformer Era",
// arXiv:2305.13048; there w = -exp(time_decay).
#ifndef HEED_OPS_GATED_RWKV4_RWKV4_H_
#define HEED_OPS_GATED_RWKV4_RWKV4_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/mechanism/recurrent.h"

namespace heed::rwkv4 {

// The memory between two calls: f64 for f64, else f32, any strides. All three or none.
struct ConstState {
  ConstTensorView num, den;  // [B, C] each: the sums, relative to exp(max)
  ConstTensorView max;       // [B, C]: the largest exponent so far; -1e38 before any
};

// That memory, where a call writes it.
struct State {
  TensorView num, den, max;
};

// B sequences, T tokens, C channels, which are contiguous; other strides as they are.
struct Inputs {
  ConstTensorView k;          // [B, T, C]: logarithms of weights; f64, f32, bf16 or f16
  ConstTensorView v;          // [B, T, C]: values, in k's dtype
  ConstTensorView log_decay;  // [C]: w <= 0, any float dtype
  ConstTensorView u;          // [C]: the bonus of the present token, any float dtype
  ConstState initial;         // num, den and max, [B, C] each; f32, or f64 for f64; absent: none so far
};

// Those of all recurrences, but for the scale.
using recurrent::Explanation;
using recurrent::Options;

// Tokens outside of lengths, starts or cu_seqlens have o = 0.
struct Outputs {
  TensorView o;  // [B, T, C] in k's dtype
  State final;
};

struct BackwardInputs : Inputs {
  ConstTensorView d_o;  // the shape and dtype of o
  ConstState d_final;   // absent: zero; none of max
};

// Those that are present are computed, in the shapes and dtypes of what they are the
// gradients of; zero for tokens that do not count.
struct Gradients {
  TensorView dk, dv, dlog_decay, du;
  State dinitial;  // none of max, which counts as a constant
};

// One token of each sequence.
struct StepInputs {
  ConstTensorView k, v;          // [B, C]
  ConstTensorView log_decay, u;  // [C]
};

// Computes o, and the state after the last token where it is asked for.
//
// Edges. Any number of tokens may be 0: the state then passes through. A positive log decay counts
// as 0, unless the Context checks; of -infinity a token sees the one before it and itself. A NaN stays in its
// channel and spreads to what follows it.
//
// Precision. f64 is computed in f64, all else in f32, and o is rounded once; states are f64 or f32.
// No exponential has a positive argument. What the sum max + w loses to rounding is made up for in
// num and den: max itself is off by up to half a rounding per token. Subnormal results are flushed.
//
// Reproducibility. The bits do not depend on threads, batch neighbours, padding or strides, nor on
// where a sequence is split into calls or steps.
//
// Cost. Two exponentials, a quotient and some 20 other operations per token and channel. Memory
// beyond the arguments: Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if a
// scale is given, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of
// range; Unsupported for a dtype that has no kernel. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double. Outputs may
// be f64 whatever the inputs are.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Computes gradients of a sum over <d_o, o> and <d_final, final>, of which max counts as a
// constant, as it cancels in whatever is computed of num exp(max) and den exp(max). As one of three
// free arguments the initial max has the gradient num dnum + den dden, which heed.torch gives it.
// With the weights of o_t, A_t of the state before and B_t of the token,
// relative to the larger one, d_t = A_t den_{t-1} + B_t, e_t = d_o_t / d_t, and E_t, F_t of the step:
//
//   dv_t = B_t e_t + F_t dnum_t,  dk_t = B_t e_t (v_t - o_t) + F_t (v_t dnum_t + dden_t)
//   dnum_{t-1} = A_t e_t + E_t dnum_t,  dden_{t-1} = -A_t e_t o_t + E_t dden_t
//   du = sum_t B_t e_t (v_t - o_t),  dw = sum_t E_t (num_{t-1} dnum_t + den_{t-1} dden_t)
//
// Sums over tokens are taken by blocks of 64 and in f64 beyond. Precision and reproducibility as
// above; split calls keep the bits at multiples of 64 tokens. Cost: four exponentials per token and
// channel, one more behind the first 64. States are kept at the borders of blocks of 64 tokens, the
// rest is computed again. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes o [B, C] of one token, the state read and updated in place, with the bits of Forward.
// Allocates nothing from a thread's second step on.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads: at most
//
//   forward   threads 4 KiB
//   backward  threads (64 + ceil(T / 64)) 768 + threads 4 KiB + 16 N C, N sequences
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward would do. Pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::rwkv4

#endif  // HEED_OPS_GATED_RWKV4_RWKV4_H_
