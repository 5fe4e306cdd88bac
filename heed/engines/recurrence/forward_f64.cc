// The recurrence forward, whole and one token, for f64. A file of its own so that dtypes
// compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/forward_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/recurrence/forward-inl.h"
#include "heed/engines/recurrence/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

void RunF64(Context& ctx, const Problem& problem) { Forward<double>(ctx, problem); }

void RunStepF64(Context& ctx, const Problem& problem) { Step<double>(ctx, problem); }

int64_t BytesF64(const Problem& problem) { return ForwardBytes<double>(problem); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(RunF64);
HWY_EXPORT(RunStepF64);
HWY_EXPORT(BytesF64);

void ForwardF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void StepF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunStepF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t ForwardBytesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BytesF64)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE
