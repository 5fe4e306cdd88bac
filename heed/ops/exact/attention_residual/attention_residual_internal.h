// Common parts of the files of attention_residual: checks, and the rows of a call.
#ifndef HEED_OPS_EXACT_ATTENTION_RESIDUAL_ATTENTION_RESIDUAL_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_RESIDUAL_ATTENTION_RESIDUAL_INTERNAL_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/ops/exact/attention_residual/attention_residual.h"

namespace heed::attention_residual {

// Checks all arguments; with `wide`, outputs may be f64. Throws InvalidArgument.
void CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide);
void CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide);

// The number of tokens, and the offset of one in a tensor whose axes of tokens are [first_axis, end_axis).
int64_t NumTokens(const Inputs& in);
int64_t TokenOffset(const ConstTensorView& t, int first_axis, int end_axis, int64_t token);

// Compute a checked call: attention_residual_rows.cc.
void ComputeRows(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);
void ComputeRowGradients(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out);

// The memory that these reserve; `sums`: the gradient of query or weight is requested.
mechanism::Reservation RowsMemory(const Inputs& in);
mechanism::Reservation RowGradientsMemory(const Inputs& in, bool sums);

}  // namespace heed::attention_residual

#endif  // HEED_OPS_EXACT_ATTENTION_RESIDUAL_ATTENTION_RESIDUAL_INTERNAL_H_
