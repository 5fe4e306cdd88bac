// The kernels of selectors for f32, also used for 16-bit tensors, which are widened.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/ops/sparse/select/select_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/sparse/select/passes_f32.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/ops/sparse/select/block_choice-inl.h"
#include "heed/ops/sparse/select/indexer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::select::HWY_NAMESPACE {

Passes PassesF32() { return {&RunTopBlocks<float>, &RunCumulative<float>, &RunIndexer<float>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::select::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::select {

HEED_EXPORT(Passes, PassesF32)

}  // namespace heed::select
#endif  // HWY_ONCE
