// Attention that skips values, vectorised over queries, for f32 and for 16-bit tensors, which are widened to f32.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/certified/skipping_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/certified/skipping_f32.cc"  // this file
#include "hwy/foreach_target.h"                                              // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/certified/skipping-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

SkippingPasses SkippingF32() { return LanePasses<FmaOperands<float>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(SkippingPasses, SkippingF32)

}  // namespace heed::softmax
#endif  // HWY_ONCE
