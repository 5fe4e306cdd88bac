// Attention that skips values, for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/certified/skipping_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/certified/skipping_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"                                                     // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/certified/skipping-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

SkippingPasses SkippingPairs() { return LanePasses<PairOperands>(); }
SkippingPasses SkippingDecodePairs() { return RowPasses<PairDecodeOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(SkippingPasses, SkippingPairs)
HEED_EXPORT(SkippingPasses, SkippingDecodePairs)

}  // namespace heed::softmax
#endif  // HWY_ONCE
