// Selection of a row's best blocks, for each SIMD target.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/patterns/top_blocks_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/patterns/top_blocks.cc"  // this file
#include "hwy/foreach_target.h"                           // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#include "heed/patterns/top_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::patterns::HWY_NAMESPACE {

TopBlocks TopBlocksFor() { return {&ChooseTop<float>, &ChooseTop<double>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::patterns::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::patterns {

HEED_EXPORT(TopBlocks, TopBlocksFor)

}  // namespace heed::patterns
#endif  // HWY_ONCE
