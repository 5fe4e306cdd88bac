// Common parts of the files of PaTH attention: a checked call, its passes, and the rows of its reference.
#ifndef HEED_OPS_EXACT_PATH_ATTENTION_PATH_ATTENTION_INTERNAL_H_
#define HEED_OPS_EXACT_PATH_ATTENTION_PATH_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/transitions_call.h"
#include "heed/ops/exact/path_attention/path_attention.h"

namespace heed::path_attention {

using transitions::Call;
using transitions::kBlock;

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide, bool values);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values);

// Checks a call of TransformKeys. Throws InvalidArgument.
void CheckKeys(const char* op, const KeyInputs& in, const TensorView& keys);

// Compute a checked call: path_attention_forward.cc and path_attention_backward.cc.
void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out);
void ComputeKeys(Context& ctx, const KeyInputs& in, const TensorView& keys);  // path_attention_keys.cc
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out);

// The memory that the passes reserve for tensors of this dtype.
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype);

// A row of a head as it is defined: token i of a sequence and the keys j <= i, in doubles.
struct ReferenceRow {
  mechanism::TokenRange sequence;
  int64_t head = 0, i = 0;
  std::vector<double> logits, forgotten, weights;  // [i + 1]: s_ij, their sums of log forget gates, P_ij
  std::vector<std::vector<double>> queries;        // [i + 1][D]: x_ij
  double lse = 0;
};
// Calls f(row) for every row of every head, rows of a head in ascending order.
void ForReferenceRows(const Call& call, const Inputs& in, const std::function<void(const ReferenceRow&)>& f);

}  // namespace heed::path_attention

#endif  // HEED_OPS_EXACT_PATH_ATTENTION_PATH_ATTENTION_INTERNAL_H_
