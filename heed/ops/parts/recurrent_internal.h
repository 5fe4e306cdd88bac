// What a mechanism on the recurrence engine says of itself, and its passes from that.
#ifndef HEED_OPS_PARTS_RECURRENT_INTERNAL_H_
#define HEED_OPS_PARTS_RECURRENT_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/ops/parts/recurrent.h"

namespace heed::recurrent {

enum class DecayShape {
  kNone,
  kHead,   // [HV]
  kToken,  // [B, T, HV]
  kKey,    // [B, T, HV, K]
};

struct Definition {
  DecayShape decay = DecayShape::kNone;
  bool root_scale = false;  // the default scale is K^-1/2, else 1
  recurrence::Feature feature = recurrence::Feature::kIdentity;
  bool causal = true;  // without it no states
  bool normalize = false;
  double eps = 0;
  bool complement_keys = false;  // k is 1 - exp(log_decay), not given
  const char* value_name = "v";
};

// Each checks all arguments before anything is written and throws InvalidArgument with
// `op`, the argument, what it got and what it expected.
void Forward(const char* op, Context& ctx, const Definition& definition,
             const Inputs& in, const Options& options, const Outputs& out);
void Backward(const char* op, Context& ctx, const Definition& definition,
              const BackwardInputs& in, const Options& options, const Gradients& out);

// One token: `state` is updated in place.
void Step(const char* op, Context& ctx, const Definition& definition,
          const StepInputs& in, const Options& options, const State& state,
          const TensorView& o);

// Bytes that the passes reserve in `ctx`, for all its threads.
int64_t Workspace(const char* op, const Context& ctx, const Definition& definition,
                  const Inputs& in, const Options& options);
int64_t BackwardWorkspace(const char* op, const Context& ctx,
                          const Definition& definition, const Inputs& in,
                          const Options& options);
Explanation Explain(const char* op, const Context& ctx, const Definition& definition,
                    const Inputs& in, const Options& options);

// The sequences of a call, in tokens of its tensors.
struct TokenRange {
  int64_t batch, begin, end;
};
std::vector<TokenRange> Ranges(const char* op, const ConstTensorView& q,
                               const Options& options);

}  // namespace heed::recurrent

#endif  // HEED_OPS_PARTS_RECURRENT_INTERNAL_H_
