// The recurrence forward, whole and one token, for f32. A file of its own so that dtypes
// compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/forward_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/recurrence/forward-inl.h"
#include "heed/engines/recurrence/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

void RunF32(Context& ctx, const Problem& problem) { Forward<float>(ctx, problem); }

void RunStepF32(Context& ctx, const Problem& problem) { Step<float>(ctx, problem); }

int64_t BytesF32(const Problem& problem) { return ForwardBytes<float>(problem); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(RunF32);
HWY_EXPORT(RunStepF32);
HWY_EXPORT(BytesF32);

void ForwardF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void StepF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunStepF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t ForwardBytesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BytesF32)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE
