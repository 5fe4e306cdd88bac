// The functions that passes over blocks of rows share, for bf16 on CPUs whose bf16 dot product outruns their FMA.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/block/block_bf16_pairs.cc"  // this file
#include "hwy/foreach_target.h"                                              // IWYU pragma: keep
// After foreach_target.h:
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/block/block_parts-inl.h"
#include "heed/engines/softmax/backward/gradient_operands-inl.h"
#include "heed/engines/softmax/block/outputs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

HEED_COMPILE_HEAD(PairOperands)
HEED_COMPILE_PASS(PairOperands, 1, LaneOutputs<PairOperands, 1>)
HEED_COMPILE_PASS(PairOperands, 2, LaneOutputs<PairOperands, 2>)
HEED_COMPILE_PASS(PairOperands, 4, LaneOutputs<PairOperands, 4>)
HEED_COMPILE_LOGITS(PairGradients, hs::kShapes.block_vectors)

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS
