// The recurrence backward for f32. Each dtype has its own file, so that they compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/backward_f32.cc"  // this file
#include "hwy/foreach_target.h"                                       // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/recurrence/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

Passes BackwardF32() { return BackwardPasses<float>(); }

Passes BackwardAmx() { return BackwardPasses<float, &AmxStates>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, BackwardF32)
HEED_EXPORT(Passes, BackwardAmx)

}  // namespace heed::recurrence
#endif  // HWY_ONCE
