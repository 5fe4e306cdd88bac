// Common parts of the files of Wall attention: a checked call, its passes, and the rows of its reference.
#ifndef HEED_OPS_EXACT_WALL_ATTENTION_WALL_ATTENTION_INTERNAL_H_
#define HEED_OPS_EXACT_WALL_ATTENTION_WALL_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/transitions_call.h"
#include "heed/ops/exact/wall_attention/wall_attention.h"

namespace heed::wall_attention {

using transitions::Call;
using transitions::kBlock;

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide, bool values);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values);

// Checks a call of TransformKeys. Throws InvalidArgument.
void CheckKeys(const char* op, const KeyInputs& in, const TensorView& keys, bool values);

// Compute a checked call: wall_attention_forward.cc, wall_attention_backward.cc and wall_attention_keys.cc.
void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out);
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out);
void ComputeKeys(Context& ctx, const KeyInputs& in, const TensorView& keys);

// The memory that the passes reserve for tensors of this dtype.
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype);

// A row of a head as it is defined: token i of a sequence and the keys j <= i, in doubles.
struct ReferenceRow {
  mechanism::TokenRange sequence;
  int64_t head = 0, i = 0;
  std::vector<double> logits, forgotten, weights;  // [i + 1]: s_ij, their sums of log forget gates, P_ij
  std::vector<std::vector<double>> decays;         // [i + 1][D]: W_ijn
  double lse = 0;
};
// Calls f(row) for every row of every head, rows of a head in ascending order.
void ForReferenceRows(const Call& call, const Inputs& in, const std::function<void(const ReferenceRow&)>& f);

}  // namespace heed::wall_attention

#endif  // HEED_OPS_EXACT_WALL_ATTENTION_WALL_ATTENTION_INTERNAL_H_
