// The recurrence backward for f64. A file of its own so that dtypes compile side by side.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/recurrence/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/backward_f64.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/recurrence/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

void BackRunF64(Context& ctx, const Problem& problem, const Gradients& gradients) {
  Backward<double>(ctx, problem, gradients);
}

BackwardBytes BackBytesF64(int64_t threads, const Problem& problem) {
  return BackwardWorkspace<double>(threads, problem, {});
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HWY_EXPORT(BackRunF64);
HWY_EXPORT(BackBytesF64);

void BackwardF64(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(BackRunF64)[TargetIndex(ctx.allowed_targets())](ctx, problem,
                                                                     gradients);
}

BackwardBytes BackwardBytesF64(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(BackBytesF64)[TargetIndex(ctx.allowed_targets())](
      ctx.num_threads(), problem);
}

}  // namespace heed::recurrence
#endif  // HWY_ONCE
