// The forward kernel for f32, in a file of its own so that dtypes compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward/forward_f32.cc"  // this file
#include "hwy/foreach_target.h"                                           // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/forward/tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

Passes ForwardF32() { return ForwardPasses<FmaOperands<float>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, ForwardF32)

const Kernel kLanesF32 = {{
    .name = "softmax_lanes_f32",
    .why = "query rows in lanes, online softmax over tiles of 64 keys, 16-bit tensors widened",
    .declines = &DeclinesF32,
    .forward_passes = &ForwardF32,
    .backward_passes = &BackwardF32,
}};

}  // namespace heed::softmax
#endif  // HWY_ONCE
