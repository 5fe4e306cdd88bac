// The selective rule for f32; bf16 and f16 are widened. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/scan/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/selective_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/scan/selective-inl.h"
#include "heed/engines/scan/selective_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

void RunF32(Context& ctx, const Problem& problem) { SelectiveForward<float>(ctx, problem); }

int64_t BytesF32(const Problem& problem) { return SelectiveForwardBytes<float>(problem); }

void BackRunF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  SelectiveBackward<float>(ctx, problem, gradients);
}

BackwardBytes BackBytesF32(const Problem& problem) {
  return SelectiveBackwardBytes<float>(problem);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HWY_EXPORT(RunF32);
HWY_EXPORT(BytesF32);
HWY_EXPORT(BackRunF32);
HWY_EXPORT(BackBytesF32);

void SelectiveForwardF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t SelectiveForwardBytesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BytesF32)[TargetIndex(ctx.allowed_targets())](problem);
}

void SelectiveBackwardF32(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(BackRunF32)
  [TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes SelectiveBackwardBytesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BackBytesF32)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::scan
#endif  // HWY_ONCE
