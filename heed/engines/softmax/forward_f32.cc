// The forward kernel for f32. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward_f32.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunF32(Context& ctx, const Problem& problem) { Forward<FmaOperands<float>>(ctx, problem); }

int64_t ScratchF32(const Problem& problem, int num_threads) {
  using O = FmaOperands<float>;
  return ScratchBytes<O>(problem, MakePlan<O>(problem), num_threads);
}

int64_t LanesF32(const Problem& problem) { return NumLanes<FmaOperands<float>>(problem); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RunF32);
HWY_EXPORT(ScratchF32);
HWY_EXPORT(LanesF32);

void ForwardF32(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunF32)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t ForwardWorkspaceF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ScratchF32)[TargetIndex(ctx.allowed_targets())](
      problem, ctx.num_threads());
}

int64_t ForwardLanesF32(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(LanesF32)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::softmax
#endif  // HWY_ONCE
