// Selective scans with f64 states. Each dtype has its own file, so that they compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/scan/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/scan/selective_f64.cc"  // this file
#include "hwy/foreach_target.h"                                  // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/scan/selective_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::scan::HWY_NAMESPACE {

Passes SelectiveF64() { return SelectivePasses<double>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::scan::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::scan {

HEED_EXPORT(Passes, SelectiveF64)

const Kernel kSelectiveF64 = {
    .name = "selective_f64",
    .why =
        "channels in lanes, 16 states of each in registers; tiles of 16 tokens are "
        "transposed where tokens are contiguous",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButF64(p.dtype);
          return reason.empty() && p.rule != Rule::kSelective ? Reason{"computes selective scans"} : reason;
        },
    .forward_passes = &SelectiveF64,
    .backward_passes = &SelectiveF64,
};

}  // namespace heed::scan
#endif  // HWY_ONCE
