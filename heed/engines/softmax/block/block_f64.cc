// The functions that passes over blocks of rows share, for f64.
#include "heed/core/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/block/block_f64.cc"  // this file
#include "hwy/foreach_target.h"                                       // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/softmax/block/block_parts-inl.h"
#include "heed/engines/softmax/block/outputs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_HEAD(FmaOperands<double>)
#if HWY_TARGET <= HWY_AVX3 || !HWY_ARCH_X86  // elsewhere all blocks have block_vectors vectors
HEED_COMPILE_PASS(FmaOperands<double>, 2, LaneOutputs<FmaOperands<double>, 2>)
#endif
HEED_COMPILE_PASS(FmaOperands<double>, hs::kShapes.block_vectors,
                  LaneOutputs<FmaOperands<double>, hs::kShapes.block_vectors>)

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
