// Products of heads through state spaces, in f32, to which 16-bit tensors are widened, and in f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/scan/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/heads.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/scan/heads-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

void HeadsRuns(Context& ctx, const Problem& p) {
  WithCompute(p, [&](auto zero) { HeadsRun<decltype(zero)>(ctx, p); });
}

void HeadsBackRuns(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&](auto zero) { HeadsBackRun<decltype(zero)>(ctx, p, g); });
}

int64_t HeadsNeeds(const Problem& p, bool backward) {
  return WithCompute(p, [&](auto zero) { return HeadsNeed<decltype(zero)>(p, backward); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HWY_EXPORT(HeadsRuns);
HWY_EXPORT(HeadsBackRuns);
HWY_EXPORT(HeadsNeeds);

void HeadsForward(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(HeadsRuns)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void HeadsBackward(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(HeadsBackRuns)[TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

int64_t HeadsForwardBytes(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(HeadsNeeds)[TargetIndex(ctx.allowed_targets())](problem, false);
}

BackwardBytes HeadsBackwardBytes(const Context& ctx, const Problem& problem) {
  return {HWY_DISPATCH_TABLE(HeadsNeeds)[TargetIndex(ctx.allowed_targets())](problem, true), 0};
}

}  // namespace heed::scan
#endif  // HWY_ONCE
