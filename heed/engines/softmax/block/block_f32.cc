// The functions that passes over blocks of rows share, for f32 and for 16-bit tensors, which are widened to f32.
#include "heed/core/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/block/block_f32.cc"  // this file
#include "hwy/foreach_target.h"                                       // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/softmax/block/block_parts-inl.h"
#include "heed/engines/softmax/block/outputs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_HEAD(FmaOperands<float>)
#if HWY_TARGET <= HWY_AVX3 || !HWY_ARCH_X86  // elsewhere all blocks have block_vectors vectors
#if HWY_TARGET <= HWY_AVX3                   // a vector has more lanes than decoding takes rows
HEED_COMPILE_PASS(FmaOperands<float>, 1, LaneOutputs<FmaOperands<float>, 1>)
#endif
HEED_COMPILE_PASS(FmaOperands<float>, 2, LaneOutputs<FmaOperands<float>, 2>)
#endif
HEED_COMPILE_PASS(FmaOperands<float>, hs::kShapes.block_vectors,
                  LaneOutputs<FmaOperands<float>, hs::kShapes.block_vectors>)

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
