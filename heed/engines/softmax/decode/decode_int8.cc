// The decode kernel for K and V quantised to int8.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode/decode_int8.cc"  // this file
#include "hwy/foreach_target.h"                                          // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/decode/decode_parts-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_ROWS(QuantizedOperands)

Passes DecodeInt8() { return DecodePasses<QuantizedOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, DecodeInt8)

const Kernel kDecodeInt8 = {{
    .name = "softmax_decode_int8",
    .why = "8 query rows per key head at once, keys and values widened as they are read, a factor per row of logits "
           "and weights",
    .declines = [](const Context&, const Problem& p) { return DeclinesAllButInt8(p); },
    .forward_passes = &DecodeInt8,
}};

}  // namespace heed::softmax
#endif  // HWY_ONCE
