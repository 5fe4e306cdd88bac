// MesaNet's layer: linear attention whose queries are solutions of a least-squares problem over all keys so far, so
// that o_t is the prediction of the linear map from keys to values that fits the tokens up to t best.
//
//   H_t = exp(g_t) H_{t-1} + beta_t k_t [k_t; v_t]^T        H: [K, K + V], H_kk and H_kv side by side
//   (H_kk,t + diag(lambda)) x_t = q_t                       by conjugate gradients
//   o_t = H_kv,t^T x_t
//
// with g = log_decay <= 0, beta >= 0, and lambda > 0 of a head. The solver starts from x = 0 and takes a fixed number
// of steps, each on the whole residual r = q - (H_kk + diag(lambda)) x, with A = H_kk + diag(lambda):
//
//   p = r = q,  then  a = <r, r> / (<p, A p> + eps),  x += a p,  r' = r - a A p,  p = r' + <r', r'> / (<r, r> + eps) p
//
// where 0 / 0 counts as 0. Without eps it is exact after K steps but for rounding; before, the error is at most
// 2 ((sqrt(c) - 1) / (sqrt(c) + 1))^steps of x in the norm of A, with the condition number c of A.
//
// Sizes: B sequences, T tokens, H heads, K and V channels, all but B, T and H >= 1. q, k and v have one float dtype and
// a contiguous last axis, any other strides; beta, lambda and log_decay have that dtype or f32 (f64 for f64), any
// strides. States and solutions are f64 for f64, else f32. Tokens outside lengths, starts or cu_seqlens have o = 0.
//
// Source: von Oswald, Scherrer, Kobayashi et al., "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training",
// arXiv:2506.05233. flash-linear-attention computes the same in chunks, with eps = 1e-5. Algorithm: README.md.
#ifndef HEED_OPS_GATED_MESA_MESA_H_
#define HEED_OPS_GATED_MESA_MESA_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::mesa {

struct Inputs {
  ConstTensorView q;              // [B, T, H, K]: queries
  ConstTensorView k;              // [B, T, H, K]: keys, of a length of about 1
  ConstTensorView v;              // [B, T, H, V]: values
  ConstTensorView beta;           // [B, T, H]: factors of what a token writes, >= 0
  ConstTensorView lamb;           // [H, K]: the regularisation lambda, > 0
  ConstTensorView log_decay;      // [B, T, H]: natural logarithms of decay factors, <= 0; absent: 0
  ConstTensorView initial_state;  // [B, H, K, K + V]: before the first token, H_kk symmetric; absent: zeros
};

struct Options {
  int64_t iterations = 30;          // steps of the solver, >= 1
  double eps = 0;                   // added to the denominators of the solver, >= 0
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states have N instead of B
};

struct Outputs {
  TensorView o;            // [B, T, H, V]: in the dtype of q
  TensorView final_state;  // [B, H, K, K + V]: after the last token; absent: not computed
  TensorView solution;     // [B, T, H, K]: x, which spares Backward half of its work; absent: not kept
};

// Computes o and, if requested, the state after the last token and the solutions.
//
// Edges. B and T may be 0. A log decay of -infinity clears the state; a positive one counts as 0, unless the
// Context checks, which also checks beta and lambda. A NaN in q stays in its token; one in k, v, beta or log_decay
// propagates to all later tokens of its sequence and head. H_kk of the initial state must be symmetric and positive
// semidefinite, which is not checked: results for others are no solutions. No square overflows or underflows. A token
// that has converged beyond the digits of the dtype takes no further steps.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. Decays are products of their
// exponentials. Rounding errors of x are those of the dtype times the condition number of A. Subnormal results are
// flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call at a multiple of 16 tokens of a sequence gives bitwise equal results; other splits and steps agree up to
// rounding.
//
// Cost. iterations (2 K K + 32 K) + 4 K (K + V) + 32 (K + V) flops per token and head: chunks of 16 tokens multiply by
// the state before them and by each other.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an option is out of
// range, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded, token by token, with as many
// steps of conjugate gradients. Outputs may be f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView d_o;            // gradient of o, in its shape and dtype
  ConstTensorView d_final_state;  // gradient of the final state; absent: zeros
  ConstTensorView solution;       // x of Forward; absent: solved again
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens.
struct Gradients {
  TensorView dq, dk, dv, dbeta, dlamb, dlog_decay, dinitial_state;
};

// Computes the gradients of sum <d_o, o> + <d_final, final> by implicit differentiation: y_t solves A_t y_t = H_kv,t
// d_o_t by as many steps, and x_t and y_t count as exact solutions. Where the solver has not converged, the result is
// therefore not the derivative of its steps. With D_ts = exp(g_{s+1} + ... + g_t):
//
//   dq_t = y_t,  dlambda = -sum_t y_t .* x_t
//   dk_s = beta_s sum_{t >= s} D_ts (<d_o_t, v_s> x_t - <x_t, k_s> y_t - <y_t, k_s> x_t)
//   dv_s = beta_s sum_{t >= s} D_ts <x_t, k_s> d_o_t
//   dbeta_s = sum_{t >= s} D_ts (<x_t, k_s> <d_o_t, v_s> - <y_t, k_s> <x_t, k_s>)
//   dg_r = sum over t >= r > s of beta_s times the terms of dbeta_s
//   dH_kk,0 = -sum_t D_t0 y_t x_t^T,  dH_kv,0 = sum_t D_t0 x_t d_o_t^T
//
// and those of d_final. dlambda is summed over sequences. The gradient of a log decay of -infinity is 0. Only
// heed.torch has the second derivative. Precision and reproducibility as above. Cost: one more solution of as many
// steps, two without `solution`. Memory: T / 64 states of [K, K + V] per thread. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading: pair by pair of tokens. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// One token of each sequence: the tensors without their axis T, and no initial state.
using StepInputs = Inputs;

// Computes o of one token and updates the state in place. Only iterations and eps have an effect. A step has the bits
// of Forward on one token. Memory-bound by the iterations, each of which reads H_kk.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients. With
// E = 4, or 8 for f64, and K and V rounded up to multiples of 16:
//
//   forward   threads (E (K (2 K + V) + 16 (8 K + 3 V)) + a few KiB)
//   backward  threads (E (K (2 K + V) + (ceil(T / 64) + 5) K (K + V) + 16 (16 K + 9 V)) + a few KiB) + 8 B H K
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::mesa

#endif  // HEED_OPS_GATED_MESA_MESA_H_
