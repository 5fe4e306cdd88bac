// Selective scans with f32 states; bf16 and f16 tensors are widened. Each dtype has its own file, so that they compile
// in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/scan/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/selective_f32.cc"  // this file
#include "hwy/foreach_target.h"                                  // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/scan/selective_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

Passes SelectiveF32() { return SelectivePasses<float>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HEED_EXPORT(Passes, SelectiveF32)

const Kernel kSelectiveF32 = {
    .name = "selective_f32",
    .why =
        "channels in lanes, 16 states of each in registers, 16-bit tensors widened; tiles of 16 tokens are "
        "transposed where tokens are contiguous",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButF32(p.dtype);
          return reason.empty() && p.rule != Rule::kSelective ? Reason{"computes selective scans"} : reason;
        },
    .forward_passes = &SelectiveF32,
    .backward_passes = &SelectiveF32,
};

}  // namespace heed::scan
#endif  // HWY_ONCE
