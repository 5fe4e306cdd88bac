// The kernels of selectors for f64.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/ops/sparse/select/select_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/sparse/select/passes_f64.cc"  // this file
#include "hwy/foreach_target.h"                                    // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/ops/sparse/select/block_choice-inl.h"
#include "heed/ops/sparse/select/indexer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::select::HWY_NAMESPACE {

Passes PassesF64() { return {&RunTopBlocks<double>, &RunCumulative<double>, &RunIndexer<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::select::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::select {

HEED_EXPORT(Passes, PassesF64)

}  // namespace heed::select
#endif  // HWY_ONCE
