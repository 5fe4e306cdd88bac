// What the files of one dtype each offer to weights.cc.
#ifndef HEED_ENGINES_SOFTMAX_WEIGHTS_INTERNAL_H_
#define HEED_ENGINES_SOFTMAX_WEIGHTS_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/engines/softmax/weights.h"

namespace heed::softmax {

struct RowsCall {
  const Problem* problem;
  GivenLse lse;
  std::span<const int64_t> queries, heads;
  WeightsOut out;
};

struct PooledCall {
  const Problem* problem;
  GivenLse lse;
  Pool pool;
  WeightsOut out;
};

struct WeightsKernels {
  void (*rows)(Context& ctx, const RowsCall& call);
  void (*pooled)(Context& ctx, const PooledCall& call);
  int64_t (*scratch)(const Problem& problem, const Pool* pool);  // null: of rows
};

WeightsKernels WeightsF32(const Context& ctx);
WeightsKernels WeightsF64(const Context& ctx);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_WEIGHTS_INTERNAL_H_
