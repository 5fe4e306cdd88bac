// Delta rules with f32 states; bf16 and f16 tensors are widened.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/delta_f32.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/recurrence/delta_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

Passes DeltaF32() { return DeltaPasses<float>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, DeltaF32)

const Kernel kDeltaF32 = {
    .name = "delta_f32",
    .why = "a delta rule token by token, each one pass over column blocks of the state, 16-bit tensors widened",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButF32(p.dtype);
          return reason.empty() ? DeclinesOtherDeltas(p) : reason;
        },
    .forward_passes = &DeltaF32,
    .backward_passes = &DeltaF32,
};

}  // namespace heed::recurrence
#endif  // HWY_ONCE
