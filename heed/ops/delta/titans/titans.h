// Titans' neural memory, linear: a matrix that is trained while it reads, by gradient descent with momentum and weight
// decay. Each token is a training example: its gradient, at the memory before the token's mini-batch, is a step of the
// momentum, and the query reads the memory so far.
//
//   e_s = w .* LN(A^T k_s) + c - (v_s - k_s)                A: [K, V], M before the mini-batch of s
//   S_t = eta_t S_{t-1} - theta_t d/dA |e_t|^2              S: [K, V], momentum
//   M_t = (1 - alpha_t) M_{t-1} + S_t                       M: [K, V], memory
//   y_t = M_t^T (scale q_t),  o_t = y_t + w .* LN(y_t) + c
//
// with K = V, LN(x) = (x - mean(x)) / sqrt(var(x) + eps), w = weight and c = bias of a head. Mini-batches have
// `mini_batch` tokens, counted from the first token of a sequence.
//
// The loss is |e|^2, without 1 / 2, as in the paper: d/dA |e_s|^2 = 2 k_s g_s^T with
//
//   z_s = A^T k_s,  r_s = 1 / sqrt(var(z_s) + eps),  x = LN(z_s),  u = w .* e_s
//   g_s = r_s (u - mean(u) - x mean(x .* u))
//
// flash-linear-attention has the layer norm and the residuals of this form. Its g_s is K u - r_s (mean(u) +
// x mean(x .* u)) instead, by a missing parenthesis, and no gradient; its calls begin with S = 0 and do not return S.
// In TTT-Linear (ttt_linear.h) eta and alpha are 0, and the memory has a bias.
//
// Sizes: B sequences, T tokens, H heads, K = V channels, all but B, T and H >= 1. q, k and v have one float dtype and a
// contiguous last axis, any other strides; weight, bias, theta, alpha and eta have that dtype or f32 (f64 for f64), any
// strides. States are f64 for f64, else f32. Tokens outside lengths, starts or cu_seqlens have o = 0.
//
// Source: Behrouz, Zhong, Mirrokni, "Titans: Learning to Memorize at Test Time", arXiv:2501.00663, section 3.
// Algorithm: README.md.
#ifndef HEED_OPS_DELTA_TITANS_TITANS_H_
#define HEED_OPS_DELTA_TITANS_TITANS_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::titans {

struct Inputs {
  ConstTensorView q;              // [B, T, H, K]: queries
  ConstTensorView k;              // [B, T, H, K]: keys
  ConstTensorView v;              // [B, T, H, V]: values, V = K
  ConstTensorView weight;         // [H, V]: the layer norm's factors
  ConstTensorView bias;           // [H, V]: the layer norm's summands
  ConstTensorView theta;          // [B, T, H]: learning rates
  ConstTensorView alpha;          // [B, T, H]: weight decays, the share of the memory that a token removes
  ConstTensorView eta;            // [B, T, H]: momentum, the share of S that a token keeps
  ConstTensorView initial_state;  // [B, H, 3, K, V]: before the first token; absent: zeros
};

struct Options {
  int64_t mini_batch = 16;          // tokens whose gradients are those of one memory, >= 1
  double eps = 1e-6;                // added to variances, >= 0
  double scale = 1;                 // factor of q
  ConstTensorView positions;        // [B] i32 or i64: tokens before the first one, with initial_state; absent: 0
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states and positions have N instead of B
};

struct Outputs {
  TensorView o;            // [B, T, H, V]: in the dtype of q
  TensorView final_state;  // [B, H, 3, K, V]: after the last token; absent: not computed
};

// Computes o and, if requested, the state after the last token.
//
// States. Part 0 of a state is M and part 1 is S, both after the last token. Part 2 is the memory A before the
// mini-batch of the next token. Where the next token begins a mini-batch, A is M: part 2 is 0 and is not read there,
// and neither is its gradient.
//
// Edges. B and T may be 0. With eps = 0 a row without variance is NaN. A NaN in q stays in its token; one in k, v,
// theta, alpha or eta propagates to all later tokens of its sequence and head.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call where a mini-batch begins, or at a multiple of 16 tokens of one, gives bitwise equal results; other splits and
// steps agree up to rounding.
//
// Cost. 10 K V + 32 (K + V) flops per token and head: chunks of up to 16 tokens of a mini-batch are multiplied by A, M
// and S, and by each other.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an option is out of
// range, if an output overlaps an input, or if lengths, starts, cu_seqlens or positions are out of range. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded, token by token. Outputs may be
// f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView d_o;            // gradient of o, in its shape and dtype
  ConstTensorView d_final_state;  // gradient of the final state; absent: zeros
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens.
struct Gradients {
  TensorView dq, dk, dv, dweight, dbias, dtheta, dalpha, deta, dinitial_state;
};

// Computes the gradients of sum <d_o, o> + <d_final, final>, through the gradients that train the memory. dweight and
// dbias are summed over sequences. Only heed.torch has the second derivative. Precision and reproducibility as above.
// Memory: 2 T / 64 states of [K, V], 3 T / 64 with longer mini-batches or positions, and T rows of V per thread. Throws
// as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading: token by token. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// One token of each sequence: the tensors without their axis T, and no initial state.
using StepInputs = Inputs;

// Computes o of one token and updates the state in place: options.positions are the tokens so far. Only mini_batch,
// eps, scale and positions have an effect. A step has the bits of Forward on one token. Memory-bound by the state.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;

// Describes what Forward would do. Data pointers may be null where only shapes are known; positions without data count
// as 0.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::titans

#endif  // HEED_OPS_DELTA_TITANS_TITANS_H_
