// The forward kernel with AMX, and emulated for tests.
#define HEED_AMX
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/amx/forward.cc"  // this file
#include "hwy/foreach_target.h"                                   // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/forward/tasks-inl.h"
#include "heed/engines/softmax/amx/operands-inl.h"
#include "heed/simd/emulated_amx-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

using Unit = hs::AmxTilesOfTarget;

// Calls f.operator()<operands of as many products as the problem takes>().
template <class F>
auto WithProducts(const Problem& p, const F& f) {
  switch (AmxProducts(p)) {
    case 1: return f.template operator()<AmxOperands<1, 1, Unit>>();
    case 3: return f.template operator()<AmxOperands<3, 3, Unit>>();
    case 4: return f.template operator()<AmxOperands<4, 5, Unit>>();
    default: return f.template operator()<AmxOperands<6, 6, Unit>>();
  }
}

void RunAmx(Context& ctx, const Problem& p) {
  WithProducts(p, [&]<class O>() { Forward<O>(ctx, p); });
}

int64_t AmxWorkspace(const Context& ctx, const Problem& p) {
  return WithProducts(p, [&]<class O>() { return ForwardWorkspace<O>(ctx, p); });
}

int64_t AmxLanes(const Problem& p) {
  return WithProducts(p, [&]<class O>() { return NumLanes<O>(p); });
}

Passes ForwardAmx() { return {.forward = &RunAmx, .workspace = &AmxWorkspace, .lanes = &AmxLanes}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, ForwardAmx)

}  // namespace heed::softmax
#endif  // HWY_ONCE
