// Code that passes over blocks of rows share, with AMX and emulated for tests.
#define HEED_AMX
#include "heed/core/targets.h"
// After targets.h:
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/amx/block.cc"  // this file
#include "hwy/foreach_target.h"                                 // IWYU pragma: keep
// After foreach_target.h:
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/block/block_parts-inl.h"
#include "heed/engines/softmax/block/outputs-inl.h"
#include "heed/engines/softmax/amx/packing-inl.h"
#include "heed/simd/emulated_amx-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

#define HEED_COMPILE_TILES(NAME, KEYS, VALUES)                                                                   \
  using NAME = AmxOperands<KEYS, VALUES, hs::AmxTilesOfTarget>;                                                  \
  template bool AmxOperands<KEYS, VALUES, hs::AmxTilesOfTarget>::PackQueries(DType, const void* const*, size_t,  \
                                                                             size_t, double, size_t, uint32_t*); \
  template bool AmxOperands<KEYS, VALUES, hs::AmxTilesOfTarget>::CopyKeys(const SourceRows&, int64_t, int64_t,   \
                                                                          int64_t, BF16*);                       \
  template void AmxOperands<KEYS, VALUES, hs::AmxTilesOfTarget>::CopyValues(const SourceRows&, int64_t, int64_t, \
                                                                            int64_t, BF16*);                     \
  HEED_COMPILE_HEAD(NAME)                                                                                        \
  HEED_COMPILE_LOGITS(NAME, NAME::kLaneVectors)                                                                  \
  HEED_COMPILE_OUTPUTS(NAME, NAME::kLaneVectors, LaneOutputs<NAME, NAME::kLaneVectors>)
HEED_COMPILE_TILES(OneProduct, 1, 1)
HEED_COMPILE_TILES(ThreeProducts, 3, 3)
HEED_COMPILE_TILES(FourProducts, 4, 5)
HEED_COMPILE_TILES(SixProducts, 6, 6)
#undef HEED_COMPILE_TILES

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS
