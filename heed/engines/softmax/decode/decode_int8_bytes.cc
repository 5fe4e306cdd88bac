// The decode kernel for K and V quantised to int8 on CPUs with integer dot products of bytes.
#define HEED_BYTE_PRODUCTS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode/decode_int8_bytes.cc"  // this file
#include "hwy/foreach_target.h"                                                // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/decode/decode_parts-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_ROWS(ByteOperands)

Passes DecodeInt8Bytes() { return DecodePasses<ByteOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, DecodeInt8Bytes)

const Kernel kDecodeInt8Bytes = {{
    .name = "softmax_decode_int8_bytes",
    .why = "8 query rows per key head at once, queries in fixed point, integer products of keys, a factor per row of "
           "logits and weights",
    .declines = [](const Context& ctx, const Problem& p) -> std::string {
      const std::string reason = DeclinesDigits(p);
      if (!reason.empty()) return reason;
      return DecodeInt8Bytes(ctx).forward != nullptr ? "" : "needs a CPU that multiplies bytes";
    },
    .forward_passes = &DecodeInt8Bytes,
    .target = [](const Context&) -> std::string { return "AVX3_DL"; },
}};

}  // namespace heed::softmax
#endif  // HWY_ONCE
