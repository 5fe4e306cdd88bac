// The kernels of attention probabilities for f32, and for 16-bit tensors, which are widened to f32.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/weights/weights_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/weights/weights_f32.cc"  // this file
#include "hwy/foreach_target.h"                                           // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/weights/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

WeightsPasses WeightsF32() { return PassesOfWeights<FmaOperands<float>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(WeightsPasses, WeightsF32)

}  // namespace heed::softmax
#endif  // HWY_ONCE
