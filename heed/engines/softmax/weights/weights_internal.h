// The passes that each file of a dtype offers to weights.cc.
#ifndef HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INTERNAL_H_
#define HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/engines/softmax/weights/weights.h"

namespace heed::softmax {

struct WeightsPasses {
  void (*rows)(Context& ctx, const Problem& problem, const GivenLse& lse, std::span<const int64_t> queries,
               std::span<const int64_t> heads, const WeightsOut& out);
  void (*pooled)(Context& ctx, const Problem& problem, const GivenLse& lse, const Pool& pool, const WeightsOut& out);
  void (*sums)(Context& ctx, const Problem& problem, int64_t first_query, int64_t num_queries, const SumsOut& out);
  int64_t (*scratch)(const Problem& problem, const Pool* pool);  // null `pool`: of RowWeights
};

WeightsPasses WeightsF32(const Context& ctx);
WeightsPasses WeightsF64(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_WEIGHTS_WEIGHTS_INTERNAL_H_
