// Entry points of the passes, one set per dtype of states.
#ifndef HEED_ENGINES_RECURRENCE_PASSES_H_
#define HEED_ENGINES_RECURRENCE_PASSES_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence {

struct BackwardBytes {
  int64_t per_thread = 0, shared = 0;
};

// F32 computes bf16 and f16 too, widened.
void ForwardF32(Context& ctx, const Problem& problem);
void ForwardF64(Context& ctx, const Problem& problem);
void BackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients);
void BackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients);

// One token; the final states are the initial ones too.
void StepF32(Context& ctx, const Problem& problem);
void StepF64(Context& ctx, const Problem& problem);

// Scratch bytes per thread.
int64_t ForwardBytesF32(const Context& ctx, const Problem& problem);
int64_t ForwardBytesF64(const Context& ctx, const Problem& problem);
BackwardBytes BackwardBytesF32(const Context& ctx, const Problem& problem);
BackwardBytes BackwardBytesF64(const Context& ctx, const Problem& problem);

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_PASSES_H_
