// The kernels of the recurrence engine, best first: one list that dispatch, Explain and Workspace read.
#ifndef HEED_ENGINES_RECURRENCE_KERNELS_H_
#define HEED_ENGINES_RECURRENCE_KERNELS_H_

#include "heed/core/context.h"
#include "heed/engines/kernel_list.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence {

using engine::BackwardBytes;
using engine::Reason;
using Passes = engine::Passes<Problem, Gradients>;
using Kernel = engine::Kernel<Problem, Gradients>;

// The first kernel that takes the problem. Throws Unsupported, with every kernel's reason, if none does.
const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem,
                     engine::Pass pass = engine::Pass::kForward);

// Each kernel is in the file of its forward pass.
extern const Kernel kCuda, kAmx, kRecurrenceF32, kRecurrenceF64, kDeltaF32, kDeltaF64, kChannels;
Passes BackwardAmx(const Context& ctx);
Passes BackwardF32(const Context& ctx);
Passes BackwardF64(const Context& ctx);

// Returns why kernels of S_t = G_t .* S_{t-1} + k_t v_t^T decline a problem; empty if it has this form.
Reason DeclinesOtherStates(const Problem& problem);

// Returns why kernels of delta rules decline a problem: a rule that reads before the decay decays by key (RWKV-7).
Reason DeclinesOtherDeltas(const Problem& problem);

}  // namespace heed::recurrence

#endif  // HEED_ENGINES_RECURRENCE_KERNELS_H_
