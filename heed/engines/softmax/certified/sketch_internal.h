// The passes of sketch.h for every SIMD target, and for CPUs with integer dot products of bytes; null on others.
#ifndef HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INTERNAL_H_
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INTERNAL_H_

#include "heed/core/context.h"
#include "heed/engines/softmax/certified/sketch.h"

namespace heed::softmax {

SketchPasses SketchOfTarget(const Context& ctx);
SketchPasses SketchOfBytes(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INTERNAL_H_
