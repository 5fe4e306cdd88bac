// TTT-Linear: a state that is a linear model, trained while it reads. Each token is a training example of the model:
// its gradient at the start of the token's mini-batch is added to the state, and the query reads the model so far.
//
//   z_s = W^T k_s + b,  e_s = w .* LN(z_s) + c - (v_s - k_s)      W: [K, V], b: [V], the state
//   G_t = sum_{s <= t} lr_s [k_s; 1] (d/dz_s |e_s|^2 / 2)^T       over the tokens s of the mini-batch of t
//   [W_t; b_t] = [W; b] - eta_t G_t
//   y_t = W_t^T q_t + b_t,  o_t = q_t + w .* LN(y_t) + c
//
// with K = V, LN(x) = (x - mean(x)) / sqrt(var(x) + eps), w = weight and c = bias of a head, and scale q_t for q_t. All
// gradients of a mini-batch are those of W and b before its first token; the next mini-batch begins with W_t and b_t of
// its last token. Mini-batches have `mini_batch` tokens, counted from the first token of a sequence.
//
// Learning rates: the paper's eta(x_s), a factor of the gradient of token s, is lr with eta = 1. The authors' code
// multiplies it by a factor of each token t that reads, which is eta; flash-linear-attention has eta alone, and the
// residual y_t for q_t.
//
// Sizes: B sequences, T tokens, H heads, K = V channels, all but B, T and H >= 1. q, k and v have one float dtype and a
// contiguous last axis, any other strides; weight, bias, eta and lr have that dtype or f32 (f64 for f64), any strides.
// States are f64 for f64, else f32. Tokens outside lengths, starts or cu_seqlens have o = 0.
//
// Source: Sun, Li, Dalal et al., "Learning to (Learn at Test Time): RNNs with Expressive Hidden States",
// arXiv:2407.04620. Algorithm: README.md.
#ifndef HEED_OPS_DELTA_TTT_LINEAR_TTT_LINEAR_H_
#define HEED_OPS_DELTA_TTT_LINEAR_TTT_LINEAR_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::ttt_linear {

struct Inputs {
  ConstTensorView q;              // [B, T, H, K]: queries
  ConstTensorView k;              // [B, T, H, K]: keys
  ConstTensorView v;              // [B, T, H, V]: values, V = K
  ConstTensorView weight;         // [H, V]: the layer norm's factors
  ConstTensorView bias;           // [H, V]: the layer norm's summands
  ConstTensorView eta;            // [B, T, H]: factors of the sum of gradients that a token reads
  ConstTensorView lr;             // [B, T, H]: factors of the gradients of tokens; absent: 1
  ConstTensorView initial_state;  // [B, H, 2, K + 1, V]: before the first token; absent: zeros
};

// The summand of o beside the normalised read: q_t, or the read y_t itself.
enum class Residual { kQuery, kOutput };

struct Options {
  int64_t mini_batch = 16;  // tokens whose gradients have the same W and b, >= 1
  double eps = 1e-6;        // added to variances, >= 0
  double scale = 1;         // factor of q
  Residual residual = Residual::kQuery;
  ConstTensorView positions;        // [B] i32 or i64: tokens before the first one, with initial_state; absent: 0
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1; states and positions have N instead of B
};

struct Outputs {
  TensorView o;            // [B, T, H, V]: in the dtype of q
  TensorView final_state;  // [B, H, 2, K + 1, V]: after the last token; absent: not computed
};

// Computes o and, if requested, the state after the last token.
//
// States. Part 0 of a state is W and, as its last row, b, both before the first token of the mini-batch of the next
// token. Part 1 is the sum G of its tokens so far. Where the next token begins a mini-batch, part 1 is 0; it is not
// read there, and neither is its gradient. W_t is part 0 minus eta_t times part 1.
//
// Edges. B and T may be 0. With eps = 0 a row without variance is NaN. A NaN in q stays in its token, and one in eta
// unless the token ends a mini-batch; one in k, v or lr propagates to all later tokens of its sequence and head.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides. Splitting a
// call where a mini-batch begins, or at a multiple of 16 tokens of one, gives bitwise equal results; other splits and
// steps agree up to rounding.
//
// Cost. 6 K V + 32 (K + V) flops per token and head, in mini-batches of 16: chunks of up to 16 tokens of a mini-batch
// are multiplied by W, and by each other. Mini-batches of more tokens take 2 K V more.
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
  TensorView dq, dk, dv, dweight, dbias, deta, dlr, dinitial_state;
};

// Computes the gradients of sum <d_o, o> + <d_final, final>, through the gradients that train the state. dweight and
// dbias are summed over sequences. Only heed.torch has the second derivative. Precision and reproducibility as above.
// Memory: T / 64 states of [K + 1, V], two with longer mini-batches or positions, and T rows of V per thread. Throws as
// Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading: token by token. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// One token of each sequence: the tensors without their axis T, and no initial state.
using StepInputs = Inputs;

// Computes o of one token and updates the state in place: options.positions are the tokens so far. Only mini_batch,
// eps, scale, residual and positions have an effect. A step has the bits of Forward on one token. Memory-bound by the
// state.
HEED_API void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state,
                   const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;

// Describes what Forward would do. Data pointers may be null where only shapes are known; positions without data count
// as 0.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::ttt_linear

#endif  // HEED_OPS_DELTA_TTT_LINEAR_TTT_LINEAR_H_
