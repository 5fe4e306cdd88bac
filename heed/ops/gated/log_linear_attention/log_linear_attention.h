// Log-linear attention: linear attention whose state is kept in parts, one for each level of a Fenwick tree, so that a
// query weights distant tokens by levels of its own.
//
//   o_t = scale sum_{s <= t} lambda_t[l(t, s)] exp(g_{s+1} + ... + g_t) <q_t, k_s> v_s
//   l(t, t) = 0,  l(t, s) = 1 + the place of the highest bit in which t and s differ, counted from the first token
//
// with g = log_decay <= 0 and lambda = level_scales. Level l > 0 is a run of 2^(l-1) tokens, all before t or none, so
// that T tokens need floor(log2 (T - 1)) + 2 levels and as many states of [K, V]. With all lambda equal it is
// simple_gla.
//
// Sizes: B sequences, T tokens, H key heads, HV value heads (a multiple of H; head h reads key head h / (HV / H)), K
// and V channels, L levels, all but B, T and H >= 1. q, k and v have one float dtype and a contiguous last axis, any
// other strides; level_scales and log_decay have that dtype or f32 (f64 for f64), any strides. States are f64 for f64,
// else f32. Tokens outside lengths, starts or cu_seqlens have o = 0.
//
// Source: Guo, Yang, Goel, Xing, Dao, Kim, "Log-Linear Attention", arXiv:2506.04761. Algorithm: README.md.
#ifndef HEED_OPS_GATED_LOG_LINEAR_ATTENTION_LOG_LINEAR_ATTENTION_H_
#define HEED_OPS_GATED_LOG_LINEAR_ATTENTION_LOG_LINEAR_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::log_linear_attention {

struct Inputs {
  ConstTensorView q;              // [B, T, H, K]: queries
  ConstTensorView k;              // [B, T, H, K]: keys
  ConstTensorView v;              // [B, T, HV, V]: values
  ConstTensorView level_scales;   // [B, T, HV, L]: factors of levels, lambda above
  ConstTensorView log_decay;      // [B, T, HV]: natural logarithms of decay factors, <= 0; absent: 0
  ConstTensorView initial_state;  // [B, HV, L, K, V]: before the first token; absent: no tokens so far
};

struct Options {
  std::optional<double> scale;      // factor of q, 1 by default
  ConstTensorView positions;        // [B] i32 or i64: tokens before the first one, with initial_state; absent: 0
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states and positions have N instead of B
};

struct Outputs {
  TensorView o;            // [B, T, HV, V]: in the dtype of q
  TensorView final_state;  // [B, HV, L, K, V]: after the last token; absent: not computed
};

// Computes o and, if requested, the states after the last token.
//
// States. After n tokens, state j is the sum of k v^T, with all decays up to the last token, over a run of 2^j tokens,
// where bit j of n is set: higher bits are runs before it. Where the bit is not set the state is 0, and it is not read.
// The next token sees state j at level j + 1.
//
// Edges. B and T may be 0. A log decay of -infinity clears all states before it; a positive one counts as 0, unless the
// Context checks. A NaN in k, v or log_decay propagates to all later tokens of its sequence and head.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. Decays are products of their
// exponentials. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call at a multiple of 64 tokens of a sequence gives bitwise equal results; other splits and steps agree up to
// rounding.
//
// Cost. 64 (K + V) + 2 K V (1 + log2(T / 64) / 2) flops per token and value head: chunks of 64 tokens compute all
// pairs, and a chunk reads one state for each bit of the number of chunks before it.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if there are too few
// levels, if an output overlaps an input, or if lengths, starts, cu_seqlens or positions are out of range. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView d_o;            // gradient of o, in its shape and dtype
  ConstTensorView d_final_state;  // gradient of the final states; absent: zeros
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens.
struct Gradients {
  TensorView dq, dk, dv, dlevel_scales, dlog_decay, dinitial_state;
};

// Computes the gradients of sum <d_o, o> + <d_final, final>. With w_ts = scale exp(g_{s+1} + ... + g_t):
//
//   dq_t = sum_s lambda w_ts <d_o_t, v_s> k_s,  dk_s = sum_t lambda w_ts <d_o_t, v_s> q_t
//   dv_s = sum_t lambda w_ts <q_t, k_s> d_o_t
//   dlambda_t[l] = sum_{s: l(t, s) = l} w_ts <q_t, k_s> <d_o_t, v_s>
//   dg_r = sum over t >= r > s of the terms of <d_o, o>
//
// Gradients of keys and queries are summed over the value heads of a key head. Only heed.torch has second derivatives.
// Precision and reproducibility as above. Memory: T / 64 states of [K, V] per thread. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// One token of each sequence: the tensors without their axis T, and no initial state.
using StepInputs = Inputs;

// Computes o of one token and updates the states in place: options.positions are the tokens so far. Only scale and
// positions have an effect. Memory-bound by the states, of which a token reads one for each bit of its position.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients. With
// E = 4, or 8 for f64, and K and V rounded up to multiples of 16, at most
//
//   forward   threads (E ((L + 1) K V + 64 (4 K + 2 V + L + 130)) + a few KiB)
//   backward  threads (E ((2 L + 3 + T / 64) K V + 64 (9 K + 7 V + 2 L + 194) + 2 T K) + 20 T + a few KiB)
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;

// Describes what Forward would do. Data pointers may be null where only shapes are known; positions without data count
// as 0.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::log_linear_attention

#endif  // HEED_OPS_GATED_LOG_LINEAR_ATTENTION_LOG_LINEAR_ATTENTION_H_
