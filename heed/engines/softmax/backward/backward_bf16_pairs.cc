// The backward passes for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/backward/backward_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"                                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/backward/backward_tasks-inl.h"
#include "heed/engines/softmax/backward/vector_gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

Passes BackwardPairs() { return BackwardPasses<VectorGradients<PairGradients>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, BackwardPairs)

}  // namespace heed::softmax
#endif  // HWY_ONCE
