// Common parts of the files of merge_linear: checks, and the rows of a call.
#ifndef HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_INTERNAL_H_
#define HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_INTERNAL_H_

#include "heed/core/context.h"
#include "heed/ops/sparse/merge_linear/merge_linear.h"

namespace heed::merge_linear {

// Checks all arguments; with `wide`, outputs may be f64. Throws InvalidArgument.
void CheckForward(const char* op, const Inputs& in, const TensorView& out, bool wide);
void CheckBackward(const char* op, const BackwardInputs& in, const Gradients& out, bool wide);

// Computes a checked call: merge_linear_rows.cc. Writes the terms of dgate to `gate_terms`, [B, T, H] f64.
void MergeRows(Context& ctx, const Inputs& in, const TensorView& out);
void MergeRowsBackward(Context& ctx, const BackwardInputs& in, const Gradients& out, double* gate_terms);

}  // namespace heed::merge_linear

#endif  // HEED_OPS_SPARSE_MERGE_LINEAR_MERGE_LINEAR_INTERNAL_H_
