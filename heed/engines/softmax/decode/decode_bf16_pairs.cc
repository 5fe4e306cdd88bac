// The decode kernel for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode/decode_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"                                                // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/decode/decode_parts-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_STREAMED_ROWS(PairDecodeOperands)

Passes DecodePairs() { return DecodePasses<PairDecodeOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, DecodePairs)

const Kernel kDecodePairs = {
    {
        .name = "softmax_decode_pairs_bf16",
        .why =
            "up to 8 query rows per key head, one pass over the keys and values as they are stored, bf16 dot products "
            "of pairs",
        .declines =
            [](const Context& ctx, const Problem& p) {
              const std::string reason = DeclinesPairs(DecodePairs(ctx), p);
              return reason.empty() ? DeclinesRows(p, DecodePairs(ctx).lanes(p)) : reason;
            },
        .forward_passes = &DecodePairs,
        .target = &PairTarget,
    },
    kPairGrid};

}  // namespace heed::softmax
#endif  // HWY_ONCE
