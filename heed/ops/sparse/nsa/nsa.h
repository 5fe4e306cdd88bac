// Native sparse attention: each row attends to summaries of all keys, to the blocks of keys that these point at, and to
// the last keys, and adds the three outputs up with gates of its own.
//
//   o_i = g_i0 compressed_i + g_i1 selected_i + g_i2 windowed_i
//
//   compressed  softmax attention over k_cmp, v_cmp, one for each window of `length` tokens, every `stride` tokens:
//   those
//               whose window ends at p_i or before
//   selected    softmax attention over keys j <= p_i of `count` blocks of keys: the first one, the row's own, the one
//               before, and those of the greatest importance
//   windowed    softmax attention over keys p_i - window < j <= p_i
//
// Row i stands at p_i = Tk - Tq + i. The importance of block b is a sum over windows w and the query heads of a key
// head of P_iw n_wb / stride, where P_iw is the probability of window w in the compressed branch and n_wb how many
// tokens window and block have in common. Where stride divides length and block this is the double sum of the paper. Of
// equal ones the lower block is chosen. What is not a block before the row's own is never a candidate.
//
// Source: Yuan et al., "Native sparse attention: hardware-aligned and natively trainable sparse attention",
// arXiv:2502.11089. How other libraries differ: README.md.
#ifndef HEED_OPS_SPARSE_NSA_NSA_H_
#define HEED_OPS_SPARSE_NSA_NSA_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::nsa {

// Sizes: B sequences, Tq queries, Tk >= Tq keys, Hq query heads, Hkv key and value heads (Hq a multiple of it; head h
// reads key head h / (Hq / Hkv)), D, Dv >= 1. One dtype for all: f64, f32, bf16 or f16. The last axis is contiguous;
// the others have any strides, zero included. N counts windows: at least those that are complete in Tk tokens; no row
// sees more. Of k_cmp and v_cmp there are both or none; without them they are means of k and v over each window,
// rounded to their dtype.
struct Inputs {
  ConstTensorView q;      // [B, Tq, Hq, D]
  ConstTensorView k;      // [B, Tk, Hkv, D]
  ConstTensorView v;      // [B, Tk, Hkv, Dv]
  ConstTensorView gates;  // [B, Tq, Hq, 3]: of compressed, selected and windowed, multiplied as they are
  ConstTensorView k_cmp;  // [B, N, Hkv, D]: what stands for the keys of each window
  ConstTensorView v_cmp;  // [B, N, Hkv, Dv]: what stands for its values
};

struct Options {
  int64_t block = 64;    // keys that are chosen together
  int64_t stride = 0;    // tokens between the beginnings of two windows; 0: block
  int64_t count = 16;    // blocks that a row attends to; the three that are never left out count
  int64_t window = 512;  // last keys, the row's own included
  int64_t length = 0;    // tokens of a window that is compressed; 0: block

  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)
};

// A branch without keys has o = 0 and lse = -inf.
struct Outputs {
  TensorView o;  // [B, Tq, Hq, Dv] in q's dtype
  // What Backward reads, all of it or nothing.
  TensorView branches;  // [3, B, Tq, Hq, Dv] in q's dtype: what is added up, without gates
  TensorView lse;       // [3, B, Hq, Tq]: the log-sum-exp of each; f64 for f64, else f32
  TensorView blocks;    // [B, Tq, Hkv, Columns()] i32: the blocks that are selected, ascending, then -1
};

// Computes o, and the others where they are present.
//
// Edges. Any size may be 0. A row before the first complete window has compressed = 0. A token influences no row before
// it, NaN included; a NaN among the importances of a row counts as the least.
//
// Precision and reproducibility are those of attention, three times; o is a sum in f32 (f64), rounded once, of outputs
// that are rounded. Choices do not depend on threads, batch neighbours, strides or on how queries are split into calls;
// rounding decides between importances that are as good as equal.
//
// Cost. 2 (D + Dv) flops and one exponential per visited pair: (count block + window + T / (2 stride)) T per head, and
// for the importances 2 D flops and one exponential more per pair of a row and a window. Memory beyond the arguments:
// Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an output overlaps an
// input or another, or if an option is out of range; Unsupported for a dtype or device that has no kernel. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does, written for reading: scalar, one thread, all in double but for the means, which are
// rounded to the dtype of k. Outputs may have dtype f64 whatever the inputs have.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes that Forward takes for all threads, part of them in `ctx`: those of attention, and what Outputs names where it
// is not asked for. Blocks are taken to be the first ones.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// What Forward was given, what it returned, and the gradient that arrives at o.
struct BackwardInputs : Inputs {
  ConstTensorView branches, lse, blocks;  // what Forward returned for them
  ConstTensorView d_o;                    // the shape and dtype of o
};

// Those that are present are computed, in the shape and dtype of what they are the gradients of, their last axis
// contiguous.
struct Gradients {
  TensorView dq, dk, dv, dgates;
  TensorView dk_cmp, dv_cmp;
};

// Computes gradients of <d_o, o>: of each branch those of attention with g d_o arriving at it, and dgates = <d_o,
// branch>. Choices have no gradient. What arrives at means goes on to the k and v that they are means of; with k_cmp
// and v_cmp given it goes there.
//
// Edges, precision, reproducibility and cost are those of attention. Memory beyond the arguments: BackwardWorkspace().
// There is no second derivative. Throws as Forward does; on throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from the inputs and d_o alone. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward takes: those of attention, what arrives at a branch, and the gradients of two of them.
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

using attention::Explanation;  // its flops and visited_pairs count all branches, and the pairs that importances need

// What Forward would do, the first blocks being chosen. The inputs' pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// How many blocks a row selects at most: count, or three, but no more than Tk tokens have.
HEED_API int64_t Columns(const Options& options, int64_t Tk);

}  // namespace heed::nsa

#endif  // HEED_OPS_SPARSE_NSA_NSA_H_
