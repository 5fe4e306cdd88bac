// DeltaFormer: causal attention whose values follow a delta rule. A token first reads the values of earlier tokens by a
// softmax of its own and subtracts what it finds from its value.
//
//   u_i = v_i - beta_i r_i,  r_i = sum_{j < i} W_ij u_j,  W_ij = exp(scale w_i^T k_j - lse_w_i)    r_0 = 0
//   o_i = sum_{j <= i} P_ij u_j,                          P_ij = exp(scale q_i^T k_j - lse_i)
//
// with lse_w_i and lse_i the log-sum-exps over j < i and j <= i, so that rows of W and P sum to 1. With beta = 0 it is
// causal attention. Published models have w = k, the default.
//
// Sizes: B sequences, T tokens, H query heads, Hkv key heads (H a multiple of it; head h reads key head h / (H / Hkv)),
// D and Dv channels, all but B and T at least 1. q, k, v and w have one float dtype and a contiguous last axis, any
// other strides; beta has that dtype or f32 (f64 for f64), any strides. lse is f64 for f64, else f32. Tokens outside
// lengths, starts or cu_seqlens have o = 0, u = 0 and lse = -infinity.
//
// With beta in [0, 1] an error of one u adds at most itself to each later one. Where |beta| is larger, u can grow
// exponentially with the number of tokens. One scale serves both softmaxes; another one for W is a factor of w.
//
// Source: Zhong, Xu, Ao, Shi, "Understanding Transformer from the Perspective of Associative Memory", arXiv:2505.19488.
// Algorithm: README.md.
#ifndef HEED_OPS_EXACT_DELTAFORMER_DELTAFORMER_H_
#define HEED_OPS_EXACT_DELTAFORMER_DELTAFORMER_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::deltaformer {

struct Inputs {
  ConstTensorView q;     // [B, T, H, D]: queries
  ConstTensorView k;     // [B, T, Hkv, D]: keys
  ConstTensorView v;     // [B, T, Hkv, Dv]: values
  ConstTensorView beta;  // [B, T, Hkv]: factors of what is subtracted; absent: 1
  ConstTensorView w;     // [B, T, Hkv, D]: queries of the values; absent: k
};

struct Options {
  std::optional<double> scale;      // factor of the logits, any finite value; default 1 / sqrt(D)
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b]
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1
};

struct Outputs {
  TensorView o;    // [B, T, H, Dv]: in the dtype of q
  TensorView u;    // [B, T, Hkv, Dv]: the values that o reads, in the dtype of q
  TensorView lse;  // [B, H, T]: natural logarithms of the denominators of P; absent: not computed
};

// Computes u, then o as attention does of q, k and u, and lse where it is present.
//
// Edges. B and T may be 0. A NaN in q stays in its row; one in k, v, w or beta reaches only its own row and later ones
// of its sequence.
//
// Precision. f64 is computed in f64, other dtypes in f32. u is rounded once, and what later tokens and o read is the
// rounded u, as in a cache of u. o is rounded once. Subnormal results are flushed to zero.
//
// Reproducibility. Results do not depend on the number of threads, other batch entries, padding or strides.
//
// Cost. 2 (D + Dv) flops and one exponential per pair of tokens and key head for u, and as much per pair and query head
// for o. A block of 64 tokens needs u of all earlier ones: the threads that compute u of one key head follow each other
// at a distance of a block. Memory: 2 numbers of the dtype of computation per element of k and u, for as many key heads
// as 64 MiB hold, at least one.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an option is out of
// range, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: token by token, with u that is not rounded. Outputs may be
// f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView o, u, lse;  // outputs of Forward
  ConstTensorView d_o;        // gradient of o, in its shape and dtype
  ConstTensorView d_u;        // gradient of u, in its shape and dtype; absent: zeros
  ConstTensorView d_lse;      // gradient of lse, in its shape and dtype; absent: zeros
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens. Without
// a w, dk has its part and there is no dw.
struct Gradients {
  TensorView dq, dk, dv, dbeta, dw;
};

// Computes the gradients of sum <d_o, o> + <d_u, u> + <d_lse, lse>, from the last token to the first:
//
//   dS_ij  = P_ij (<d_o_i, u_j> - <d_o_i, o_i> + d_lse_i)
//   dv_j   = d_u_j + sum_{i >= j} P_ij d_o_i + sum_{i > j} W_ij dr_i,  dr_i = -beta_i dv_i
//   dR_ij  = W_ij (<dr_i, u_j> - <dr_i, r_i>)
//   dq_i   = scale sum_{j <= i} dS_ij k_j,  dw_i = scale sum_{j < i} dR_ij k_j
//   dk_j   = scale (sum_{i >= j} dS_ij q_i + sum_{i > j} dR_ij w_i),  dbeta_i = -<r_i, dv_i>
//
// with dv and dk summed over the query heads of a key head. r is recomputed from u, and P from lse; v is not read. Only
// heed.torch has the second derivative. Precision and reproducibility as above; sums are in f32, or f64 for f64, and
// rounded once. Cost: 8 D + 6 Dv flops per pair and key head beside those of attention's gradients. Memory: 5 numbers
// of the dtype of computation per element of k and 3 per element of u, for as many key heads as 64 MiB hold, and one
// per element of k, two of u and, in 16 bits, one of q. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from all inputs but o and lse. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;  // flops and visited_pairs are those of both softmaxes

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// Decoding. A cache keeps k and u of all tokens so far.
struct ValueInputs {
  ConstTensorView k;     // [B, Tk, Hkv, D]: keys of all tokens
  ConstTensorView v;     // [B, N, Hkv, Dv]: values of the newest N tokens, N <= Tk
  ConstTensorView beta;  // [B, N, Hkv]: their factors; absent: 1
  ConstTensorView w;     // [B, N, Hkv, D]: their queries of the values; absent: their keys
};

// Computes the last N rows of u [B, Tk, Hkv, Dv] from the rows before them. With N = Tk it is u of whole sequences,
// with N = 1 that of one more token; whole, in parts and token by token have the same bits, those of Forward. Then o of
// the newest tokens is attention::Forward of their queries, k and u under a causal mask. `scale` and everything else as
// for Forward.
HEED_API void Values(Context& ctx, const ValueInputs& in, std::optional<double> scale, const TensorView& u);

// Computes what Values does in double, written for reading. u may be f64 whatever the dtype of the inputs.
HEED_API void ValuesReference(const ValueInputs& in, std::optional<double> scale, const TensorView& u);

}  // namespace heed::deltaformer

#endif  // HEED_OPS_EXACT_DELTAFORMER_DELTAFORMER_H_
