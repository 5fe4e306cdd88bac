// The selective rule for f64. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/scan/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/selective_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/scan/selective-inl.h"
#include "heed/engines/scan/selective_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

void RunF64(Context& ctx, const Problem& problem) { SelectiveForward<double>(ctx, problem); }

int64_t BytesF64(const Problem& problem) { return SelectiveForwardBytes<double>(problem); }

void BackRunF64(Context& ctx, const Problem& problem, const Gradients& gradients) {
  SelectiveBackward<double>(ctx, problem, gradients);
}

BackwardBytes BackBytesF64(const Problem& problem) {
  return SelectiveBackwardBytes<double>(problem);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HWY_EXPORT(RunF64);
HWY_EXPORT(BytesF64);
HWY_EXPORT(BackRunF64);
HWY_EXPORT(BackBytesF64);

void SelectiveForwardF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t SelectiveForwardBytesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BytesF64)[TargetIndex(ctx.allowed_targets())](problem);
}

void SelectiveBackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(BackRunF64)
  [TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes SelectiveBackwardBytesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BackBytesF64)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::scan
#endif  // HWY_ONCE
