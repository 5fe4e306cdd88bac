// Bounds of softmax sums from a sketch, on CPUs with integer dot products of bytes.
#define HEED_BYTE_PRODUCTS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/certified/sketch_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/certified/sketch_bytes.cc"  // this file
#include "hwy/foreach_target.h"                                              // IWYU pragma: keep
// After foreach_target.h:
#include "heed/engines/export_passes.h"
#if HWY_TARGET & HEED_ONLY_TARGETS
#include "heed/engines/softmax/certified/sketch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

SketchPasses SketchOfBytes() { return Sketch(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET & HEED_ONLY_TARGETS

#if HWY_ONCE
namespace heed::softmax {

HEED_EXPORT(SketchPasses, SketchOfBytes)

}  // namespace heed::softmax
#endif  // HWY_ONCE
