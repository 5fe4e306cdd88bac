// Delta rules with f64 states.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/delta_f64.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/recurrence/delta_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

Passes DeltaF64() { return DeltaPasses<double>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, DeltaF64)

const Kernel kDeltaF64 = {
    .name = "delta_f64",
    .why = "a delta rule token by token, each one pass over column blocks of the state",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButF64(p.dtype);
          return reason.empty() ? DeclinesOtherDeltas(p) : reason;
        },
    .forward_passes = &DeltaF64,
    .backward_passes = &DeltaF64,
};

}  // namespace heed::recurrence
#endif  // HWY_ONCE
