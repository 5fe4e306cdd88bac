// The passes that each file of operands offers to skipping.cc.
#ifndef HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INTERNAL_H_
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INTERNAL_H_

#include <cstdint>

#include "heed/engines/softmax/certified/skipping.h"

namespace heed::softmax {

// The passes over one kind of block; null where the CPU has none.
struct SkippingPasses {
  void (*forward)(Context& ctx, const Problem& problem, const Skips& skips) = nullptr;
  int64_t (*workspace)(const Problem& problem) = nullptr;  // bytes per thread
  int64_t (*lanes)(const Problem& problem) = nullptr;
};

SkippingPasses SkippingF32(const Context& ctx);
SkippingPasses SkippingDecodeF32(const Context& ctx);
SkippingPasses SkippingPairs(const Context& ctx);
SkippingPasses SkippingDecodePairs(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_INTERNAL_H_
