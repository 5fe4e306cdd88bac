// Common parts of the files of ttt_linear: a checked call, its passes, and bounds of rounding errors.
#ifndef HEED_OPS_DELTA_TTT_LINEAR_TTT_LINEAR_INTERNAL_H_
#define HEED_OPS_DELTA_TTT_LINEAR_TTT_LINEAR_INTERNAL_H_

#include "heed/core/context.h"
#include "heed/ops/delta/common/test_time_training_internal.h"
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

namespace heed::ttt_linear {

struct Call : test_time_training::Call {
  bool query_residual = true;
};

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide);

// Compute a checked call: ttt_linear_forward.cc and ttt_linear_backward.cc. A step is a forward pass whose initial and
// final state are one tensor.
void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out);
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out);

// The memory that these reserve for tensors of this dtype.
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype);

// Bounds of the rounding errors of each result per unit of relative error of an operation: a running error analysis of
// the references.
void ReferenceBounds(const Inputs& in, const Options& options, const Outputs& out);
void BackwardReferenceBounds(const BackwardInputs& in, const Options& options, const Gradients& out);

}  // namespace heed::ttt_linear

#endif  // HEED_OPS_DELTA_TTT_LINEAR_TTT_LINEAR_INTERNAL_H_
