// Attention residuals: a layer's input as a softmax over the outputs of all earlier layers, in the place of their sum.
//
//   s_l = scale <query, weight .* v_l / sqrt(mean(v_l^2) + eps)>
//   o   = sum_l p_l v_l,  p = softmax over l of s
//
// for each token, with v_l the output of layer l. The query is learned and belongs to the layer that reads, as does the
// weight of the RMS norm.
//
// Source: Kimi Team, "Attention Residuals", arXiv:2603.15031.
#ifndef HEED_OPS_EXACT_ATTENTION_RESIDUAL_ATTENTION_RESIDUAL_H_
#define HEED_OPS_EXACT_ATTENTION_RESIDUAL_ATTENTION_RESIDUAL_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/structs.h"

namespace heed::attention_residual {

// Sizes: L >= 1 layers, D >= 1 channels. Any strides, but the last axis of residuals is contiguous.
struct Inputs {
  ConstTensorView query;      // [D]: the query of the layer that reads
  ConstTensorView residuals;  // [L, ..., D]: outputs of earlier layers, with 1 to 4 axes of tokens; any float dtype
  ConstTensorView weight;     // [D]: weight of the RMS norm, ones where absent
};

struct Options {
  double eps = 1e-6;  // added to the mean square of a row, >= 0
  double scale = 1;   // factor of the logits
};

struct Outputs {
  TensorView o;        // [..., D]: in the dtype of residuals
  TensorView weights;  // [L, ...]: p, f32, or f64 for f64; absent: not computed
};

// Computes o and, if requested, the probabilities.
//
// Edges. Any axis of tokens may be 0. A row of zeros has the logit 0. A NaN or an infinity makes the outputs of its
// token NaN. No square overflows.
//
// Precision. Logits and probabilities are computed in f64 from sums in f32 (f64 for f64), and o is rounded once. query
// and weight may have any float dtype, but f64 only beside residuals of f64. The bits do not depend on threads, other
// tokens or strides.
//
// Cost. 6 L D flops per token, bound by reading residuals once.
//
// Throws InvalidArgument if a rank, shape, dtype, device or stride disagrees with the above, if an output overlaps an
// input, or if an option is out of range. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Computes what Forward does in double, written for reading: scalar and single-threaded. Outputs may be f64 whatever
// the dtype of the inputs.
HEED_API void Reference(const Inputs& in, const Options& options, const Outputs& out);

struct BackwardInputs : Inputs {
  ConstTensorView d_o;  // gradient of o, in its shape and dtype
};

// Only present tensors are computed, in the shape and dtype of their inputs.
struct Gradients {
  TensorView dquery, dresiduals, dweight;
};

// Computes gradients of <d_o, o>. With r_l = 1 / sqrt(mean(v_l^2) + eps), u = weight .* query and
// a_l = scale r_l p_l (<d_o, v_l> - <d_o, o>):
//
//   dv_l = p_l d_o + a_l (u - r_l^2 <u, v_l> / D v_l)
//   dquery = weight .* sum a_l v_l,  dweight = query .* sum a_l v_l     sums over layers and tokens
//
// Probabilities have no gradient of their own. Only heed.torch has the second derivative. Precision and reproducibility
// as above. Cost: 14 L D flops per token. Throws as Forward does.
HEED_API void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// Computes what Backward does, written for reading. Outputs may be f64.
HEED_API void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out);

// Bytes that the passes reserve in `ctx`, for all threads together. BackwardWorkspace is that of all gradients.
HEED_API int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options);
HEED_API int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options);

using mechanism::Explanation;

// Describes what Forward would do. Data pointers may be null where only shapes are known.
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

}  // namespace heed::attention_residual

#endif  // HEED_OPS_EXACT_ATTENTION_RESIDUAL_ATTENTION_RESIDUAL_H_
