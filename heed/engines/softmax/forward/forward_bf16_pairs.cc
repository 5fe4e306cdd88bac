// The forward kernel for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/forward/forward_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"                                                  // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/forward/tasks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

Passes ForwardPairs() { return ForwardPasses<PairOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, ForwardPairs)

const Kernel kPairs = {
    {
        .name = "softmax_pairs_bf16",
        .why = "bf16 dot products of pairs, query rows in lanes, online softmax over tiles of 128 keys",
        .declines = [](const Context& ctx, const Problem& p) { return DeclinesPairs(ForwardPairs(ctx), p); },
        .forward_passes = &ForwardPairs,
        .backward_passes = &BackwardPairs,
        .target = &PairTarget,
    },
    kPairGrid};

}  // namespace heed::softmax
#endif  // HWY_ONCE
