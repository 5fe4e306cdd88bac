// Compressed attention: one softmax over the last keys and over compressed keys, each of which represents `ratio`
// tokens.
//
//   s_ij = scale <q_i, k_j>        where p_i - window < j <= p_i
//   s_ic = scale <q_i, k_cmp_c>    where (c + 1) ratio <= p_i + 1, and c is one of chosen_i if `chosen` is present
//
//   o_i = (sum_j exp(s_ij) v_j + sum_c exp(s_ic) v_cmp_c) / (sum_j exp(s_ij) + sum_c exp(s_ic) + exp(sink_h))
//
// Row i has position p_i = start + i. A compressed key is complete, and may be seen, from the last of its tokens on,
// also by rows whose window contains these tokens. Without sinks the last term of the denominator is absent.
//
// With `starts` and `lengths`, sequence b is the tokens starts[b] <= t < lengths[b] of the start + Tq tokens whose last
// Tk k has. With `cu_seqlens`, q, k and v have sequences one after another, and k_cmp and v_cmp the compressed keys of
// each, floor(tokens / ratio), one after another too. The above then holds for each sequence: positions, compressed
// keys and chosen ones count from its own first.
//
// DeepSeek-V4 compresses 4 tokens and chooses (CSA), or 128 tokens without a choice (HCA). DeepSeek-V3.2 (DSA) is the
// case ratio = 1, window = 0, with k and v as compressed keys and values.
//
// Source: DeepSeek-AI, "DeepSeek-V4: towards highly efficient million-token context intelligence", technical report,
// 2026, sections 2.3.1 and 2.3.2; "DeepSeek-V3.2", arXiv:2512.02556. Derivation, and how other libraries differ:
// README.md.
#ifndef HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_H_
#define HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::compressed_attention {

// Sizes: B sequences, Tq queries, Tk >= Tq keys, N compressed keys, Hq query heads, Hkv key and value heads (Hq a
// multiple of it; head h reads key head h / (Hq / Hkv)), D, Dv >= 1. One dtype for all float tensors except sinks: f64,
// f32, bf16 or f16. The last axis of these is contiguous; all others have any strides, including zero.
//
// N is at least the number of compressed keys that are complete at the last row, floor((start + Tq) / ratio), or at the
// last row of the longest sequence, or those of all packed sequences; no row sees more.
struct Inputs {
  ConstTensorView q;      // [B, Tq, Hq, D]
  ConstTensorView k;      // [B, Tk, Hkv, D]: the last Tk tokens before position start + Tq
  ConstTensorView v;      // [B, Tk, Hkv, Dv]
  ConstTensorView k_cmp;  // [B, N, Hkv, D]: compressed keys, from the sequence's first token on
  ConstTensorView v_cmp;  // [B, N, Hkv, Dv]
  // [B, Tq, n], or [B, Tq, Hkv, n], i32 or i64: the compressed keys that a row sees, in any order, each once and
  // complete at the row's position; -1: none. Absent: all that are complete. Indexers choose such keys (select.h).
  ConstTensorView chosen;
  ConstTensorView sinks;  // [Hq], any float dtype: an extra logit of each head without a value; optional
};

struct Options {
  int64_t ratio = 4;     // tokens per compressed key
  int64_t window = 128;  // last keys, including the row's own; 0: none
  // Position of row 0, Tk - Tq or more; by default k begins at position 0. With a larger one k holds the last Tk tokens
  // only, and windows end where it begins.
  std::optional<int64_t> start;
  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)
  // [B] i32 or i64: tokens starts[b] <= t < lengths[b], 0 to start + Tq; by default all. They are tokens of k unless
  // `start` says that k has the last ones only, whose first one then is token start + Tq - Tk.
  ConstTensorView lengths, starts;
  ConstTensorView cu_seqlens;  // [N + 1]: N packed sequences, B = 1, Tq = Tk, without `start`
};

// lse is optional: the log-sum-exp over keys and compressed keys (sinks not included), natural logarithm, -inf where a
// row sees no key.
struct Outputs {
  TensorView o;    // [B, Tq, Hq, Dv] in q's dtype
  TensorView lse;  // [B, Hq, Tq]; f64 for f64, else f32
};

// Computes o, and lse where it is present.
//
// Edges. Any size may be 0. A row that sees no key has o = 0 and lse = -inf, and so have rows outside lengths, starts
// or cu_seqlens, whose chosen keys are not read. Keys and compressed keys that a row does not see cannot influence it,
// even if they are NaN; a row that sees a NaN is NaN.
//
// Precision and reproducibility are those of attention. The windows and the compressed keys are two parts, whose
// results are merged in f32 (f64) and rounded once. Bits do not depend on threads, other batch entries, padding,
// packing, strides or the order of `chosen`; they may depend on the split of queries into calls.
//
// Cost. 2 (D + Dv) flops and one exponential per pair of a row and a key that it sees. Chosen keys are read in place,
// for all query heads of a key head at once. Memory beyond the arguments: Workspace(), and 8 bytes per element of
// `chosen`.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if `chosen` has a key that
// is not complete or appears twice in a row, if an output overlaps an input or another, or if an option, lengths,
// starts or cu_seqlens are out of range; Unsupported for a dtype or device without a kernel. On throw, nothing has been
// written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. `out` may have dtype f64
// whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes that Forward reserves in `ctx`, for all threads together. A `chosen` without data counts as the first keys.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// The inputs and outputs of Forward, and the gradients of the outputs.
struct BackwardInputs : Inputs {
  ConstTensorView o, lse;  // outputs of Forward
  ConstTensorView d_o;     // gradient of o, in its shape and dtype
  ConstTensorView d_lse;   // gradient of lse, in its shape and dtype; zero if absent
};

// Only present tensors are computed. Each has the shape and dtype of its input, with a contiguous last axis.
struct Gradients {
  TensorView dq, dk, dv;
  TensorView dk_cmp, dv_cmp;
  TensorView dsinks;
};

// Computes the gradients of sum <d_o, o> + <d_lse, lse>: those of attention for each part, with o and lse of the whole
// row. `chosen` has none. Gradients of dq in 16 bits are rounded for each part, then added.
//
// Keys that no row sees and tokens of no sequence have gradients of exactly 0. Edges, precision, reproducibility and
// cost are otherwise those of attention. Memory beyond the arguments: BackwardWorkspace(). Only heed.torch has the
// second derivative. Throws as Forward does. On throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from the inputs, d_o and d_lse only. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward reserves: those of attention, and dq of one part.
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

using attention::Explanation;  // flops and visited_pairs count both parts

// Describes what Forward would do. Data pointers may be null where only shapes are known; a `chosen` without data
// counts as the first keys.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::compressed_attention

#endif  // HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_H_
