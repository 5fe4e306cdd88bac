// The recurrence forward, whole and one token, for f32. Each dtype has its own file, so that they compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/forward_f32.cc"  // this file
#include "hwy/foreach_target.h"                                      // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/recurrence/forward-inl.h"
#include "heed/engines/recurrence/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

template class RowReader<float>;
HEED_BLOCKS_OF(, float)

Passes ForwardF32() {
  return {.forward = &Forward<float>, .workspace = &ForwardWorkspace<float>, .step = &Step<float>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, ForwardF32)

const Kernel kRecurrenceF32 = {
    .name = "recurrence_f32",
    .why = "the recurrence itself, four tokens on column blocks of the state in registers, 16-bit tensors widened",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButF32(p.dtype);
          return reason.empty() ? DeclinesOtherStates(p) : reason;
        },
    .forward_passes = &ForwardF32,
    .backward_passes = &BackwardF32,
};

}  // namespace heed::recurrence
#endif  // HWY_ONCE
