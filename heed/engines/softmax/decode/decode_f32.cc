// The decode kernel for f32, in a file of its own so that dtypes compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode/decode_f32.cc"  // this file
#include "hwy/foreach_target.h"                                         // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/softmax/decode/decode_parts-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_STREAMED_ROWS(DecodeOperands<float>)

Passes DecodeF32() { return DecodePasses<DecodeOperands<float>>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(Passes, DecodeF32)

const Kernel kDecodeF32 = {{
    .name = "softmax_decode_f32",
    .why = "up to 8 query rows per key head, one pass over the keys and values as they are stored",
    .declines =
        [](const Context& ctx, const Problem& p) {
          const std::string reason = DeclinesF32(ctx, p);
          return reason.empty() ? DeclinesRows(p, DecodeF32(ctx).lanes(p)) : reason;
        },
    .forward_passes = &DecodeF32,
}};

}  // namespace heed::softmax
#endif  // HWY_ONCE
