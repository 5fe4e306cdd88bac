// Convolutions with taps, in f32, to which 16-bit tensors are widened, and in f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/scan/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/convolution.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/scan/convolution-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

void ConvolutionRuns(Context& ctx, const Problem& p) {
  WithCompute(p, [&](auto zero) { ConvolutionRun<decltype(zero)>(ctx, p); });
}

void ConvolutionBackRuns(Context& ctx, const Problem& p, const Gradients& g) {
  WithCompute(p, [&](auto zero) { ConvolutionBackRun<decltype(zero)>(ctx, p, g); });
}

int64_t ConvolutionNeeds(const Problem& p, bool backward) {
  return WithCompute(
      p, [&](auto zero) { return RowBytes<ConvolutionBuffers<decltype(zero)>>(p, backward); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HWY_EXPORT(ConvolutionRuns);
HWY_EXPORT(ConvolutionBackRuns);
HWY_EXPORT(ConvolutionNeeds);

void ConvolutionForward(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(ConvolutionRuns)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

void ConvolutionBackward(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(ConvolutionBackRuns)
  [TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

int64_t ConvolutionForwardBytes(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ConvolutionNeeds)[TargetIndex(ctx.allowed_targets())](problem, false);
}

BackwardBytes ConvolutionBackwardBytes(const Context& ctx, const Problem& problem) {
  const int64_t bytes =
      HWY_DISPATCH_TABLE(ConvolutionNeeds)[TargetIndex(ctx.allowed_targets())](problem, true);
  return {bytes, 0};
}

}  // namespace heed::scan
#endif  // HWY_ONCE
