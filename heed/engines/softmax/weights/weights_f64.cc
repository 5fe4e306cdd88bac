// The kernels of attention probabilities for f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/weights/weights_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/weights/weights_f64.cc"  // this file
#include "hwy/foreach_target.h"                                           // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/weights/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

WeightsPasses WeightsF64() { return PassesOfWeights<FmaOperands<double>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(WeightsPasses, WeightsF64)

}  // namespace heed::softmax
#endif  // HWY_ONCE
