// Native sparse attention: each row attends to compressed keys, to selected blocks of keys with the highest importance,
// and to the last keys, and sums the three outputs with gates.
//
//   o_i = g_i0 compressed_i + g_i1 selected_i + g_i2 windowed_i
//
//   compressed  softmax attention over k_cmp, v_cmp, one for each window of `length` tokens, every `stride` tokens,
//               if the window ends at or before p_i
//   selected    softmax attention over keys j <= p_i of `count` blocks of keys: the first one, the row's own, the one
//               before, and those of the greatest importance
//   windowed    softmax attention over keys p_i - window < j <= p_i
//
// Row i has position p_i = Tk - Tq + i. The importance of block b is the sum over windows w and the query heads of a
// key head of P_iw n_wb / stride, where P_iw is the probability of window w in the compressed branch and n_wb the
// number of tokens in both window and block. Where stride divides length and block this is the double sum of the paper.
// Ties go to the lower block. Only blocks before the row's own are candidates.
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
// the others have any strides, including zero. N counts windows: at least those that are complete in Tk tokens; no row
// sees more. k_cmp and v_cmp are both present or both absent; by default they are means of k and v over each window,
// rounded to the dtype.
struct Inputs {
  ConstTensorView q;      // [B, Tq, Hq, D]
  ConstTensorView k;      // [B, Tk, Hkv, D]
  ConstTensorView v;      // [B, Tk, Hkv, Dv]
  ConstTensorView gates;  // [B, Tq, Hq, 3]: factors of compressed, selected and windowed, without an activation
  ConstTensorView k_cmp;  // [B, N, Hkv, D]: compressed key of each window
  ConstTensorView v_cmp;  // [B, N, Hkv, Dv]: compressed value of each window
};

struct Options {
  int64_t block = 64;    // keys per selected block
  int64_t stride = 0;    // tokens between the starts of consecutive windows; 0: block
  int64_t count = 16;    // blocks that a row selects, including the three that are always selected
  int64_t window = 512;  // last keys, including the row's own
  int64_t length = 0;    // tokens per compressed window; 0: block

  std::optional<double> scale;  // factor of the logits, any finite value; default 1 / sqrt(D)
};

// A branch without keys has o = 0 and lse = -inf.
struct Outputs {
  TensorView o;  // [B, Tq, Hq, Dv] in q's dtype
  // Inputs of Backward: all present or all absent.
  TensorView branches;  // [3, B, Tq, Hq, Dv] in q's dtype: outputs of the branches, without gates
  TensorView lse;       // [3, B, Hq, Tq]: the log-sum-exp of each; f64 for f64, else f32
  TensorView blocks;    // [B, Tq, Hkv, Columns()] i32: the selected blocks, ascending, then -1
};

// Computes o, and the other outputs where present.
//
// Edges. Any size may be 0. A row before the first complete window has compressed = 0. A token influences no earlier
// row, even if it is NaN; an importance of NaN counts as the smallest.
//
// Precision and reproducibility are those of attention for each branch; o is a sum in f32 (f64), rounded once, of
// rounded outputs. Selections do not depend on threads, other batch entries, strides or the split of queries into
// calls; between nearly equal importances they depend on rounding.
//
// Cost. 2 (D + Dv) flops and one exponential per computed pair: (count block + window + T / (2 stride)) T per head, and
// for the importances 2 D flops and one exponential more per pair of a row and a window. Memory beyond the arguments:
// Workspace().
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an output overlaps an
// input or another, or if an option is out of range; Unsupported for a dtype or device without a kernel. On throw,
// nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded; only the means are rounded to
// the dtype of k. Outputs may have dtype f64 whatever the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

// Bytes that Forward reserves for all threads, partly in `ctx`: those of attention, and the absent tensors of Outputs.
// Assumes that the first blocks are selected.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);

// The inputs and outputs of Forward, and the gradient of o.
struct BackwardInputs : Inputs {
  ConstTensorView branches, lse, blocks;  // outputs of Forward
  ConstTensorView d_o;                    // gradient of o, in its shape and dtype
};

// Only present tensors are computed. Each has the shape and dtype of its input, with a contiguous last axis.
struct Gradients {
  TensorView dq, dk, dv, dgates;
  TensorView dk_cmp, dv_cmp;
};

// Computes the gradients of <d_o, o>: for each branch those of attention with the output gradient g d_o, and dgates =
// <d_o, branch>. Selections have no gradient. Gradients of means are added to those of k and v; if k_cmp and v_cmp are
// given, they are dk_cmp and dv_cmp.
//
// Edges, precision, reproducibility and cost are those of attention. Memory beyond the arguments: BackwardWorkspace().
// Only heed.torch has the second derivative. Throws as Forward does. On throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading, from the inputs and d_o only. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that Backward reserves: those of attention, the output gradient of a branch, and the gradients of two branches.
HEED_API int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options,
                                   const Gradients& out);

using attention::Explanation;  // flops and visited_pairs count all branches, and the pairs for the importances

// Describes what Forward would do, if the first blocks are selected. Data pointers may be null where only shapes are
// known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// The largest number of blocks that a row selects: max(count, 3), limited to the blocks in Tk tokens.
HEED_API int64_t Columns(const Options& options, int64_t Tk);

}  // namespace heed::nsa

#endif  // HEED_OPS_SPARSE_NSA_NSA_H_
