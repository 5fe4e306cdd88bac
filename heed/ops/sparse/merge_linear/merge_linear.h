// One denominator for exact attention over some keys and linear attention over all others, as in LoLCATs.
//
//   o = (g exp(lse) o_exact + num) / (g exp(lse) + den)
//
// The exact part is given with its log-sum-exp, as attention returns it; the linear part with its numerator sum phi(q)
// phi(k) v and its denominator sum phi(q) phi(k). One call of linear attention returns both if a column of ones is
// appended to the values.
//
// Source: Zhang et al., "LoLCATs: on low-rank linearizing of large language models", arXiv:2410.10254.
#ifndef HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_H_
#define HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed::merge_linear {

// Sizes: B sequences, T rows, H heads, Dv channels. Any strides, but the last axis of o and num is contiguous. o, lse
// and num are all f64 or none of them is; float dtypes may differ otherwise.
struct Inputs {
  ConstTensorView o;     // [B, T, H, Dv]: output of the exact part
  ConstTensorView lse;   // [B, H, T]: its log-sum-exp, natural logarithm; -inf: no exact part
  ConstTensorView num;   // [B, T, H, Dv]: the numerator of the linear part
  ConstTensorView den;   // [B, T, H]: its denominator, 0 without a linear part
  ConstTensorView gate;  // [H]: factor of the exact part, 1 where absent
};

// Computes `out`, [B, T, H, Dv] in o's dtype.
//
// Edges. Any size may be 0. A row without either part is 0, and so is a row whose denominator cancels to 0. No lse
// overflows: both weights are divided by the larger one. o is not read where lse = -inf.
//
// Precision. Weights of rows are computed in f64, sums in f32 (f64) and rounded once. The bits do not depend on
// threads, other batch entries or strides.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above or if an output overlaps an
// input. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const TensorView& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. `out` may have dtype f64.
HEED_API void Reference(const Inputs& in, const TensorView& out);

struct BackwardInputs : Inputs {
  ConstTensorView d_o;  // gradient of the result, in its shape and dtype
};

// Only present tensors are computed, in the shape and dtype of their inputs.
struct Gradients {
  TensorView dexact, dlse, dnum, dden, dgate;  // dexact is the gradient of o
};

// Computes gradients of <d_o, out>. With W = g exp(lse) + den and r = g exp(lse) / W:
//
//   dexact = r d_o,  dnum = d_o / W,  dden = -<d_o, out> / W
//   dlse = r <d_o, o - out>,  dgate = sum exp(lse) / W <d_o, o - out>
//
// An absent part of a row has gradients of 0, and a row without either part has only zeros. Only heed.torch has the
// second derivative. Throws as Forward does. On throw, nothing has been written.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Gradients& out);

// Computes what Backward does, written for reading. Outputs may have dtype f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Gradients& out);

}  // namespace heed::merge_linear

#endif  // HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_H_
