// The rules of one state per channel, with states of f32, bf16 and f16 tensors widened, and of f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/engines/scan/passes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/elementwise.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/scan/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

// f(T(), rule) with the type that is computed in.
template <class F>
auto WithRule(const Problem& p, const F& f) {
  const auto of = [&](auto zero) {
    return p.rule == Rule::kDecay ? f(zero, std::integral_constant<Rule, Rule::kDecay>())
                                  : f(zero, std::integral_constant<Rule, Rule::kGates>());
  };
  return p.dtype == DType::kF64 ? of(double{}) : of(float{});
}

void ElementwiseRuns(Context& ctx, const Problem& p) {
  WithRule(p, [&](auto zero, auto rule) { ElementwiseRun<decltype(zero), rule>(ctx, p); });
}

int64_t ElementwiseNeeds(const Problem& p) {
  return WithRule(p, [&](auto zero, auto) { return ElementwiseBytes<decltype(zero)>(p); });
}

void ElementwiseBackRuns(Context& ctx, const Problem& p, const Gradients& g) {
  WithRule(p, [&](auto zero, auto rule) { ElementwiseBackRun<decltype(zero), rule>(ctx, p, g); });
}

BackwardBytes ElementwiseBackNeeds(const Problem& p) {
  return WithRule(p, [&](auto zero, auto) { return ElementwiseBackBytes<decltype(zero)>(p); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HWY_EXPORT(ElementwiseRuns);
HWY_EXPORT(ElementwiseNeeds);
HWY_EXPORT(ElementwiseBackRuns);
HWY_EXPORT(ElementwiseBackNeeds);

void ElementwiseForward(Context& ctx, const Problem& problem) {
  HWY_DISPATCH_TABLE(ElementwiseRuns)[TargetIndex(ctx.allowed_targets())](ctx, problem);
}

int64_t ElementwiseForwardBytes(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ElementwiseNeeds)[TargetIndex(ctx.allowed_targets())](problem);
}

void ElementwiseBackward(Context& ctx, const Problem& problem, const Gradients& gradients) {
  HWY_DISPATCH_TABLE(ElementwiseBackRuns)
  [TargetIndex(ctx.allowed_targets())](ctx, problem, gradients);
}

BackwardBytes ElementwiseBackwardBytes(const Context& ctx, const Problem& problem) {
  return HWY_DISPATCH_TABLE(ElementwiseBackNeeds)[TargetIndex(ctx.allowed_targets())](problem);
}

}  // namespace heed::scan
#endif  // HWY_ONCE
