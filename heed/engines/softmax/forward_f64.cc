// The forward kernel for f64. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/softmax/tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunF64(Context& ctx, const Problem& problem) { Forward<FmaOperands<double>>(ctx, problem); }

int64_t ScratchF64(const Problem& problem, int num_threads) {
  using O = FmaOperands<double>;
  return ScratchBytes<O>(problem, MakePlan<O>(problem), num_threads);
}

int64_t LanesF64(const Problem& problem) { return NumLanes<FmaOperands<double>>(problem); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HWY_EXPORT(RunF64);
HWY_EXPORT(ScratchF64);
HWY_EXPORT(LanesF64);

void ForwardF64(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(RunF64)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t ForwardWorkspaceF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ScratchF64)[TargetIndex(ctx.allowed_targets())](
      problem, ctx.num_threads());
}

int64_t ForwardLanesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(LanesF64)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::softmax
#endif  // HWY_ONCE
