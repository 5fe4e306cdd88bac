// Delta rules with states of f64.
#include "heed/core/targets.h"
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/delta_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "heed/engines/recurrence/delta-inl.h"
#include "heed/engines/recurrence/delta_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

void DeltaRunF64(Context& ctx, const Problem& problem) { DeltaForward<double>(ctx, problem); }

void DeltaRunStepF64(Context& ctx, const Problem& problem) { DeltaStep<double>(ctx, problem); }

int64_t DeltaBytesF64(const Problem& problem) { return DeltaForwardBytes<double>(problem); }

void DeltaBackRunF64(Context& ctx, const Problem& problem, const Gradients& gradients) {
  DeltaBackward<double>(ctx, problem, gradients);
}

BackwardBytes DeltaBackBytesF64(const Problem& problem) {
  return DeltaBackwardBytes<double>(problem);
}

}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(DeltaRunF64);
HWY_EXPORT(DeltaRunStepF64);
HWY_EXPORT(DeltaBytesF64);
HWY_EXPORT(DeltaBackRunF64);
HWY_EXPORT(DeltaBackBytesF64);

void DeltaForwardF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(DeltaRunF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void DeltaStepF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(DeltaRunStepF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t DeltaForwardBytesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(DeltaBytesF64)[TargetIndex(ctx.allowed_targets())](problem);
}

void DeltaBackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(DeltaBackRunF64)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes DeltaBackwardBytesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(DeltaBackBytesF64)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE
