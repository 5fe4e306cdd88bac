// Parallax attention (parameterized local linear attention): causal softmax attention minus the covariance, under its
// probabilities, of the values with a second logit.
//
//   o_i = m_i - sum_j P_ij (t_ij - a_i) v_j,  P_ij = exp(scale q_i^T k_j - lse_i),  t_ij = r_i^T k_j
//   m_i = sum_j P_ij v_j,  a_i = sum_j P_ij t_ij,  lse_i = log sum_j exp(scale q_i^T k_j)
//
// over the keys j that row i sees. This is m_i (1 + a_i) - sum_j P_ij t_ij v_j, and m_i minus the derivative of softmax
// attention with respect to q_i in the direction r_i / scale. With r = 0 it is causal attention. t is not scaled.
//
// Row i has position p_i = Tk - Tq + i, Tq <= Tk: the rows are the last tokens of the keys. It sees j <= p_i and, with
// a window, p_i - window < j. With Tq = Tk these are whole sequences. Decoding is the same call, with all keys and
// values so far and the newest rows of q and r.
//
// Sizes: B sequences, Tq rows, Tk keys, H query heads, Hkv key heads (H a multiple of it; head h reads key head
// h / (H / Hkv)), D and Dv channels, all but B, Tq and Tk at least 1. q, r, k and v have one float dtype and a
// contiguous last axis, any other strides. m, a and lse are f64 for f64, else f32. Rows outside lengths, starts or
// cu_seqlens have o = 0, m = 0, a = 0 and lse = -infinity.
//
// Source: Zuo, Pai, Zeng, Dewulf, Hu, Wang, "Parallax: Parameterized Local Linear Attention for Language Modeling",
// arXiv:2605.29157, as in flash-linear-attention 0.5.2, fla/ops/parallax. Algorithm: README.md.
#ifndef HEED_OPS_EXACT_PARALLAX_ATTENTION_PARALLAX_ATTENTION_H_
#define HEED_OPS_EXACT_PARALLAX_ATTENTION_PARALLAX_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::parallax_attention {

struct Inputs {
  ConstTensorView q;  // [B, Tq, H, D]: queries
  ConstTensorView r;  // [B, Tq, H, D]: queries of the second logits
  ConstTensorView k;  // [B, Tk, Hkv, D]: keys
  ConstTensorView v;  // [B, Tk, Hkv, Dv]: values
};

struct Options {
  std::optional<double> scale;      // factor of the first logits, any finite value; default 1 / sqrt(D)
  int64_t window = 0;               // last keys that a row sees, including its own; 0: all
  ConstTensorView lengths, starts;  // [B] i32 or i64: tokens starts[b] <= t < lengths[b] of k and v
  ConstTensorView cu_seqlens;       // [N + 1]: N packed sequences, B = 1, Tq = Tk
};

// All outputs but o are optional. The backward pass reads all of them.
struct Outputs {
  TensorView o;    // [B, Tq, H, Dv]: in the dtype of q
  TensorView m;    // [B, Tq, H, Dv]: o of softmax attention, the means of the values
  TensorView a;    // [B, H, Tq]: means of the second logits
  TensorView lse;  // [B, H, Tq]: natural logarithms of the softmax's denominators
};

// Computes o, and the other outputs where they are present.
//
// Edges. B, Tq and Tk may be 0. A NaN in q or r stays in its row; one in k or v reaches only rows that see it.
//
// Precision. f64 is computed in f64, other dtypes in f32, and outputs are rounded once. The covariance is a sum over
// t_ij minus a running mean, not a difference of two moments: its error grows with the spread of t, and with the
// rounding of t itself, but not with its mean. Subnormal results are flushed to zero.
//
// Reproducibility. The bits of a row depend on its own sequence up to its position: not on threads, other batch
// entries, padding or strides, nor on how many rows there are, so that decoding has the bits of the whole sequence.
//
// Cost. 4 (D + Dv) flops and one exponential per pair that is seen: blocks of 64 keys outside the window are skipped.
// Memory: per thread 4 numbers of the dtype of computation per channel of 64 tokens, whatever the length. Rows of one
// key head and token are computed together; a row's keys are not divided among threads.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an option is out of
// range, if an output overlaps an input, or if lengths, starts or cu_seqlens are out of range. On throw, nothing has
// been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: row by row, with all its weights. Outputs may be f64
// whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView o, m, a, lse;  // outputs of Forward
  ConstTensorView d_o;           // gradient of o, in its shape and dtype
  ConstTensorView d_lse;         // gradient of lse, in its shape and dtype; absent: zeros
};

// Only present tensors are computed, in the shape and dtype of their inputs; they are zero for excluded tokens and for
// keys that no row sees.
struct Gradients {
  TensorView dq, dr, dk, dv;
};

// Computes the gradients of sum <d_o, o> + <d_lse, lse>. With x_ij = <d_o_i, v_j - m_i>:
//
//   dS_ij = P_ij (x_ij (1 + a_i - t_ij) + <d_o_i, m_i - o_i> + d_lse_i)
//   dt_ij = -P_ij x_ij
//   dq_i  = scale sum_j dS_ij k_j,  dr_i = sum_j dt_ij k_j
//   dk_j  = sum_i scale dS_ij q_i + dt_ij r_i,  dv_j = sum_i P_ij (1 + a_i - t_ij) d_o_i
//
// with dk and dv summed over the query heads of a key head. P and t are recomputed, P from lse. m and a have no
// gradient here. Only heed.torch has the second derivative. Precision and reproducibility as above; sums are in f32, or
// f64 for f64, and rounded once. Cost: 12 D + 4 Dv flops per pair. Memory: one number of the dtype of computation per
// element of k and v, for as many key heads as 64 MiB hold, at least one, and 12 per channel of 64 tokens for each
// thread. Throws as Forward.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from all inputs but o, m, a and lse. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;  // visited_pairs are those of whole blocks of 64 tokens

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::parallax_attention

#endif  // HEED_OPS_EXACT_PARALLAX_ATTENTION_PARALLAX_ATTENTION_H_
