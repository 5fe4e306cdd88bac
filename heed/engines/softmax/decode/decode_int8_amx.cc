// The decode kernel for int8 rows with AMX, and emulated for tests.
#define HEED_AMX
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode/decode_int8_amx.cc"  // this file
#include "hwy/foreach_target.h"                                              // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/decode/decode_parts-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_ROWS(ByteOperands)

Passes DecodeInt8Amx() { return DecodePasses<ByteOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, DecodeInt8Amx)

const Kernel kDecodeInt8Amx = {{
    .name = "softmax_decode_int8_tiles",
    .why = "16 query rows per key head at once, queries and weights in fixed point, integer products with AMX, "
           "a factor per row of logits and weights",
    .declines = [](const Context& ctx, const Problem& p) -> std::string {
      const std::string reason = DeclinesDigits(p);
      if (!reason.empty()) return reason;
      if (p.group() < kFewestAmxHeads) {
        return "gains from " + std::to_string(kFewestAmxHeads) + " query heads per key head on";
      }
      return DeclinesWithoutAmx(DecodeInt8Amx(ctx));
    },
    .forward_passes = &DecodeInt8Amx,
    .target = &AmxTarget,
}};

}  // namespace heed::softmax
#endif  // HWY_ONCE
