// The recurrence forward, whole and one token, for f64. Each dtype has its own file, so that they compile in parallel.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/recurrence/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/recurrence/forward_f64.cc"  // this file
#include "hwy/foreach_target.h"                                      // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/engines/recurrence/forward-inl.h"
#include "heed/engines/recurrence/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {

template class RowReader<double>;
HEED_BLOCKS_OF(, double)

Passes ForwardF64() {
  return {.forward = &Forward<double>, .workspace = &ForwardWorkspace<double>, .step = &Step<double>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::recurrence {

HEED_EXPORT(Passes, ForwardF64)

const Kernel kRecurrenceF64 = {
    .name = "recurrence_f64",
    .why = "the recurrence itself, four tokens on column blocks of the state in registers",
    .declines =
        [](const Context&, const Problem& p) {
          const Reason reason = engine::DeclinesAllButF64(p.dtype);
          return reason.empty() ? DeclinesOtherStates(p) : reason;
        },
    .forward_passes = &ForwardF64,
    .backward_passes = &BackwardF64,
};

}  // namespace heed::recurrence
#endif  // HWY_ONCE
