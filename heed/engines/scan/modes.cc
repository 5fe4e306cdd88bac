// State spaces from token to token, in f32, to which 16-bit tensors are widened, and in f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/scan/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/modes.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/scan/mode_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

void ModesRuns(Context& ctx, const Problem& p) {
  WithCompute(p, [&](auto zero) { ModesRun<decltype(zero)>(ctx, p); });
}

void ModesBackRuns(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&](auto zero) { ModesBackRun<decltype(zero)>(ctx, p, g); });
}

int64_t ModesNeeds(const Problem& p, bool backward) {
  return WithCompute(
      p, [&](auto zero) { return RowBytes<ModeBuffers<decltype(zero)>>(p, backward); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HWY_EXPORT(ModesRuns);
HWY_EXPORT(ModesBackRuns);
HWY_EXPORT(ModesNeeds);

void ModesForward(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(ModesRuns)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void ModesBackward(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(ModesBackRuns)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

int64_t ModesForwardBytes(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ModesNeeds)[TargetIndex(ctx.allowed_targets())](problem, false);
}

BackwardBytes ModesBackwardBytes(const Context& ctx, const Problem& problem) {
  return {HWY_DISPATCH_TABLE(ModesNeeds)[TargetIndex(ctx.allowed_targets())](problem, true), 0};
}

}  // namespace heed::scan
#endif  // HWY_ONCE
