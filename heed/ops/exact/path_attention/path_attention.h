// PaTH attention: causal softmax attention whose positions are accumulated Householder-like transformations.
//
//   H_t  = I - beta_t w_t w_t^T
//   s_ij = scale q_i^T (H_i H_{i-1} ... H_{j+1}) k_j + sum_{t=j+1..i} log_forget_t     for j <= i
//   o_i  = sum_{j <= i} P_ij v_j,  P_ij = exp(s_ij - lse_i),  lse_i = log sum_{j <= i} exp(s_ij)
//
// The logit of a pair depends on all tokens between key and query. With log_forget it is PaTH-FoX; with beta = 0 and
// log_forget, forgetting attention; with beta = 0 alone, causal attention. The path never holds the key's own token.
//
// Sizes: B sequences, T tokens, H query heads, Hkv key heads (H a multiple of it; head h reads key head h / (H / Hkv)),
// D and Dv channels, all but B and T at least 1. q, k, v and w have one float dtype and a contiguous last axis, any
// other strides; beta and log_forget have that dtype or f32 (f64 for f64), any strides. lse is f64 for f64, else f32.
// Tokens outside lengths, starts or cu_seqlens have o = 0 and lse = -infinity.
//
// Nothing is normalised here. The caller normalises w to a length of 1, and q and k if the model does; then beta in
// [0, 2] never lengthens a vector. Where beta_t |w_t|^2 is larger than 2, logits grow exponentially with the distance.
//
// Source: Yang, Shen, Wen, Tan, Mishra, Ren, Panda, Kim, "PaTH Attention: Position Encoding via Accumulating
// Householder Transformations", arXiv:2505.16381; the forget gate: Lin, Nikishin, He, Courville, arXiv:2503.02130.
// flash-linear-attention multiplies log_forget by the scale too. Algorithm: README.md.
#ifndef HEED_OPS_EXACT_PATH_ATTENTION_PATH_ATTENTION_H_
#define HEED_OPS_EXACT_PATH_ATTENTION_PATH_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::path_attention {

struct Inputs {
  ConstTensorView q;           // [B, T, H, D]: queries
  ConstTensorView k;           // [B, T, Hkv, D]: keys
  ConstTensorView v;           // [B, T, Hkv, Dv]: values
  ConstTensorView w;           // [B, T, Hkv, D]: directions of the transformations, of a length of 1
  ConstTensorView beta;        // [B, T, Hkv]: their factors, in [0, 2]
  ConstTensorView log_forget;  // [B, T, H]: natural logarithms of forget gates, <= 0; absent: 0
};

struct Options {
  std::optional<double> scale;      // factor of the logits, any finite value; default 1 / sqrt(D)
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1
};

struct Outputs {
  TensorView o;    // [B, T, H, Dv]: in the dtype of q
  TensorView lse;  // [B, H, T]: natural logarithms of the softmax's denominators; absent: not computed
};

// Computes o, and lse where it is present.
//
// Edges. B and T may be 0. A log forget gate of -infinity hides all earlier keys; a positive one is added as it is,
// unless the Context checks, which throws for a positive or NaN one. A NaN in q stays in its row; one in k, v, w, beta
// or log_forget reaches only its own row and later ones of its sequence.
//
// Precision. f64 is computed in f64, other dtypes in f32, and o is rounded once. A query passes through one matrix per
// 64 tokens, so that the rounding errors of a logit grow with the square root of its distance. Subnormal results are
// flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides.
//
// Cost. With b = 64 tokens of a block: 2 (D + Dv) + 2 D D / b flops and one exponential per pair, where causal
// attention has 2 (D + Dv), and 4 D D + b (8 D + 2 b) per token and key head. Memory: 7 numbers of the dtype of
// computation per element of k, for as many key heads as 64 MiB hold, at least one.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an option is out of
// range, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: pair by pair, each query passing through one H after the
// other. Outputs may be f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView o, lse;  // outputs of Forward
  ConstTensorView d_o;     // gradient of o, in its shape and dtype
  ConstTensorView d_lse;   // gradient of lse, in its shape and dtype; absent: zeros
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens.
struct Gradients {
  TensorView dq, dk, dv, dw, dbeta, dlog_forget;
};

// Computes the gradients of sum <d_o, o> + <d_lse, lse>. With x_ij = H_{j+1} ... H_i q_i, the query as key j meets it,
// and its gradient dx_ij = scale dS_ij k_j + H_j dx_i,j-1:
//
//   dS_ij  = P_ij (<d_o_i, v_j> - <d_o_i, o_i> + d_lse_i)
//   dq_i   = dx_ii,  dk_j = scale sum_{i >= j} dS_ij x_ij,  dv_j = sum_{i >= j} P_ij d_o_i
//   dw_t   = -beta_t sum_{i >= t} (<w_t, x_it> dx_i,t-1 + <w_t, dx_i,t-1> x_it)
//   dbeta_t = -sum_{i >= t} <w_t, x_it> <w_t, dx_i,t-1>
//   dlog_forget_t = sum_{i >= t > j} dS_ij
//
// with dk, dv, dw and dbeta summed over the query heads of a key head. The first token's w, beta and log_forget are in
// no path and have gradients of 0, as has a log forget gate of -infinity. P is recomputed from lse. Only heed.torch has
// the second derivative. Precision and reproducibility as above. Cost: 8 D + 6 Dv + 6 D D / b flops per pair. Memory:
// 20 numbers per element of k, for as many key heads as 64 MiB hold, and 2 per element of a head of q for each thread.
// Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from all inputs but o and lse. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;  // visited_pairs are those of whole blocks of 64 tokens

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// Decoding. Keys that have passed all tokens so far are keys of plain attention for the newest token's query.
struct KeyInputs {
  ConstTensorView w;     // [B, N, Hkv, D]: directions of the newest N tokens
  ConstTensorView beta;  // [B, N, Hkv]: their factors
};

// Updates keys [B, Tk, Hkv, D], of which the last N are those of the tokens in `in`, N <= Tk, in place:
//
//   k_j = H_{Tk-1} ... H_m k_j,  m = max(j + 1, Tk - N)
//
// With N = Tk these are the keys of a whole sequence for the tokens after it; with N = 1, those of one more token. Then
// o of the newest token is attention::Forward on its query, these keys, the values so far and, with forget gates, their
// logarithms as log_decay under a causal mask. keys has the dtype of w, or f32 (f64 for f64) so that rounding does not
// add up from token to token; beta has either. Any strides, but the last axes of w and keys are contiguous. Precision,
// reproducibility and errors as above. Cost: 4 D flops for each key and token that it passes; with N = 1 it is bound by
// reading and writing the keys.
HEED_API void TransformKeys(Context& ctx, const KeyInputs& in, const TensorView& keys);

// Computes what TransformKeys does in double, written for reading.
HEED_API void TransformKeysReference(const KeyInputs& in, const TensorView& keys);

}  // namespace heed::path_attention

#endif  // HEED_OPS_EXACT_PATH_ATTENTION_PATH_ATTENTION_H_
