// The backward passes for f32, in a file of their own so that dtypes compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/backward/backward_f32.cc"  // this file
#include "hwy/foreach_target.h"                                             // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/backward/backward_tasks-inl.h"
#include "heed/engines/softmax/backward/vector_gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

Passes BackwardF32() { return BackwardPasses<VectorGradients<FmaGradients<float>>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, BackwardF32)

}  // namespace heed::softmax
#endif  // HWY_ONCE
