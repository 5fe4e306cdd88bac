// Delta rules with states of f32: bf16 and f16 tensors are widened.
#include "heed/core/targets.h"
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/delta_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "heed/engines/recurrence/delta-inl.h"
#include "heed/engines/recurrence/delta_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

void DeltaRunF32(Context& ctx, const Problem& problem) { DeltaForward<float>(ctx, problem); }

void DeltaRunStepF32(Context& ctx, const Problem& problem) { DeltaStep<float>(ctx, problem); }

int64_t DeltaBytesF32(const Problem& problem) { return DeltaForwardBytes<float>(problem); }

void DeltaBackRunF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  DeltaBackward<float>(ctx, problem, gradients);
}

BackwardBytes DeltaBackBytesF32(const Problem& problem) {
  return DeltaBackwardBytes<float>(problem);
}

}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(DeltaRunF32);
HWY_EXPORT(DeltaRunStepF32);
HWY_EXPORT(DeltaBytesF32);
HWY_EXPORT(DeltaBackRunF32);
HWY_EXPORT(DeltaBackBytesF32);

void DeltaForwardF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(DeltaRunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void DeltaStepF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(DeltaRunStepF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t DeltaForwardBytesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(DeltaBytesF32)[TargetIndex(ctx.allowed_targets())](problem);
}

void DeltaBackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(DeltaBackRunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes DeltaBackwardBytesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(DeltaBackBytesF32)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE
