// Scans with one state per channel, in f32, to which 16-bit tensors are widened, or in f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/scan/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/elementwise.cc"  // this file
#include "hwy/foreach_target.h"                                // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/scan/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

HEED_ROW_COPIES_OF(, float)
HEED_ROW_COPIES_OF(, double)

// Calls f.operator()<T, rule>() with the compute type T.
template <class F>
auto WithRule(const Problem& p, const F& f) {
  const auto of = [&]<class T>() {
    return p.rule == Rule::kDecay ? f.template operator()<T, Rule::kDecay>() : f.template operator()<T, Rule::kGates>();
  };
  return p.dtype == DType::kF64 ? of.template operator()<double>() : of.template operator()<float>();
}

void ElementwiseForward(Context& ctx, const Problem& p) {
  WithRule(p, [&]<class T, Rule kRule>() { ElementwiseRun<T, kRule>(ctx, p); });
}

int64_t ElementwiseWorkspace(const Context&, const Problem& p) {
  return WithRule(p, [&]<class T, Rule>() { return ElementwiseBytes<T>(p); });
}

void ElementwiseBackward(Context& ctx, const Problem& p, const Gradients& g) {
  WithRule(p, [&]<class T, Rule kRule>() { ElementwiseBackRun<T, kRule>(ctx, p, g); });
}

BackwardBytes ElementwiseBackwardWorkspace(const Context&, const Problem& p, const Gradients&) {
  return WithRule(p, [&]<class T, Rule>() { return ElementwiseBackBytes<T>(p); });
}

Passes Elementwise() {
  return {.forward = &ElementwiseForward,
          .workspace = &ElementwiseWorkspace,
          .backward = &ElementwiseBackward,
          .backward_workspace = &ElementwiseBackwardWorkspace};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HEED_EXPORT(Passes, Elementwise)

const Kernel kElementwise = {
    .name = "elementwise",
    .why = "channels in lanes, 16-bit tensors widened; tiles of 16 tokens are transposed where tokens are contiguous",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButFloats(p.dtype);
          const bool has_rule = p.rule == Rule::kDecay || p.rule == Rule::kGates;
          return reason.empty() && !has_rule ? Reason{"computes one state per channel"} : reason;
        },
    .forward_passes = &Elementwise,
    .backward_passes = &Elementwise,
};

}  // namespace heed::scan
#endif  // HWY_ONCE
