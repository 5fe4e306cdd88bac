// One denominator for exact attention over some keys and linear attention over all others, as in LoLCATs.
//
//   o = (g exp(lse) o_exact + num) / (g exp(lse) + den)
//
// The exact part comes with its log-sum-exp, as attention returns it; the linear one with its numerator sum phi(q)
// phi(k) v and its denominator sum phi(q) phi(k), which one call of linear attention has if a column of ones stands
// beside the values.
//
// Source: Zhang et al., "LoLCATs: on low-rank linearizing of large language models", arXiv:2410.10254.
#ifndef HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_H_
#define HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed::merge_linear {

// Sizes: B sequences, T rows, H heads, Dv channels. Any strides, but the last axis of o and num is contiguous. Either
// o, lse and num are f64 or none of them is; otherwise float dtypes may differ.
struct Inputs {
  ConstTensorView o;     // [B, T, H, Dv]: of the exact part
  ConstTensorView lse;   // [B, H, T]: its log-sum-exp, natural logarithm; -inf: there is no exact part
  ConstTensorView num;   // [B, T, H, Dv]: the numerator of the linear part
  ConstTensorView den;   // [B, T, H]: its denominator, 0 where there is none
  ConstTensorView gate;  // [H]: factor of the exact part, 1 where absent
};

// Computes `out`, [B, T, H, Dv] in o's dtype.
//
// Edges. Any size may be 0. A row that has neither part is 0, and so is one whose denominator comes to 0 by signs. No
// lse overflows: both weights are divided by the larger one. What o holds where lse = -inf is not read.
//
// Precision. Weights of rows are computed in f64, sums in f32 (f64) and rounded once. The bits do not depend on
// threads, batch neighbours or strides.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above or if an output overlaps an
// input; on throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const TensorView& out);

// Computes what Forward does, written for reading: scalar, one thread, in double. `out` may have dtype f64.
HEED_API void Reference(const Inputs& in, const TensorView& out);

struct BackwardInputs : Inputs {
  ConstTensorView d_o;  // of the result, in its shape and dtype
};

// Those that are present are computed, in the shape and dtype of what they are the gradients of.
struct Gradients {
  TensorView dexact, dlse, dnum, dden, dgate;  // dexact is that of o
};

// Computes gradients of <d_o, out>. With W = g exp(lse) + den and r = g exp(lse) / W:
//
//   dexact = r d_o,  dnum = d_o / W,  dden = -<d_o, out> / W
//   dlse = r <d_o, o - out>,  dgate = sum exp(lse) / W <d_o, o - out>
//
// A part that a row does not have gets 0, and so does everything of a row that has none. There is no second derivative.
// Throws as Forward does; on throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Gradients& out);

// Computes what Backward does, written for reading. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Gradients& out);

}  // namespace heed::merge_linear

#endif  // HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_H_
