// Common parts of the files of log_linear_attention: a checked call, and its passes.
#ifndef HEED_OPS_GATED_LOG_LINEAR_ATTENTION_LOG_LINEAR_ATTENTION_INTERNAL_H_
#define HEED_OPS_GATED_LOG_LINEAR_ATTENTION_LOG_LINEAR_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/plan_internal.h"
#include "heed/ops/gated/log_linear_attention/log_linear_attention.h"

namespace heed::log_linear_attention {

// The tokens of a sequence, and how many came before them.
struct Sequence {
  int64_t batch, begin, end, position;
};

struct Call {
  std::vector<Sequence> sequences;
  double scale = 1;
  int64_t B = 0, T = 0, H = 0, G = 0, K = 0, V = 0, L = 0;  // G value heads
};

// Check all arguments; with `wide`, outputs may be f64. Throw InvalidArgument.
Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide, bool values);
Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values);

// Compute a checked call: log_linear_attention_chunks.cc. The last one is a call of one token.
void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out);
void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out);
void ComputeStep(Context& ctx, const Call& call, const Inputs& in, const TensorView& state, const TensorView& o);

// The memory that these reserve for tensors of this dtype. A step reserves that of a forward pass.
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype);
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype);

}  // namespace heed::log_linear_attention

#endif  // HEED_OPS_GATED_LOG_LINEAR_ATTENTION_LOG_LINEAR_ATTENTION_INTERNAL_H_
