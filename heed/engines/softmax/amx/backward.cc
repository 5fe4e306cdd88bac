// The backward passes with AMX, and emulated for tests.
#define HEED_AMX
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/amx/backward.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/backward/backward_tasks-inl.h"
#include "heed/engines/softmax/amx/gradients-inl.h"
#include "heed/simd/emulated_amx-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

using Unit = hs::AmxTilesOfTarget;

// Calls f.operator()<operands of as many products as the problem takes>(). f16 takes the terms of f32 for P and as many
// for what P multiplies, with a third term of zeros.
template <class F>
auto WithGradients(const Problem& p, const F& f) {
  if (p.dtype == DType::kBF16) return f.template operator()<AmxGradients<AmxOperands<1, 1, Unit>>>();
  if (p.high_precision) return f.template operator()<AmxGradients<AmxOperands<3, 3, Unit>>>();
  return f.template operator()<AmxGradients<AmxOperands<6, 6, Unit>>>();
}

void BackwardRun(Context& ctx, const Problem& p, const Gradients& g) {
  WithGradients(p, [&]<class P>() { Backward<P>(ctx, p, g); });
}

BackwardBytes BackwardNeeds(const Context& ctx, const Problem& p, const Gradients& g) {
  return WithGradients(p, [&]<class P>() { return BackwardWorkspace<P>(ctx, p, g); });
}

Passes BackwardAmx() { return {.backward = &BackwardRun, .backward_workspace = &BackwardNeeds}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, BackwardAmx)

}  // namespace heed::softmax
#endif  // HWY_ONCE
