// The forward kernel for f64, in a file of its own so that dtypes compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward/forward_f64.cc"  // this file
#include "hwy/foreach_target.h"                                           // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/forward/tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

Passes ForwardF64() { return ForwardPasses<FmaOperands<double>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, ForwardF64)

const Kernel kLanesF64 = {{
    .name = "softmax_lanes_f64",
    .why = "query rows in lanes, online softmax over tiles of 64 keys",
    .declines = &DeclinesF64,
    .forward_passes = &ForwardF64,
    .backward_passes = &BackwardF64,
}};

}  // namespace heed::softmax
#endif  // HWY_ONCE
