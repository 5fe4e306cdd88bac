// Attention that does without the values of keys which weigh next to nothing, and a bound of what they weigh.
//
// All logits are computed. While the softmax streams over tiles of keys, a row leaves the values of a tile out if all
// that it has left out so far, this tile included, weighs at most epsilon of what it knows of its weights by then,
// released evenly over its keys. The tiles that a row keeps are computed as if there were no others.
#ifndef HEED_ENGINES_SOFTMAX_SKIPPING_H_
#define HEED_ENGINES_SOFTMAX_SKIPPING_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"

namespace heed::softmax {

struct Skips {
  double epsilon = 0;  // above 0, below 1
  // Written, f32, if it is there: at least the share of the row's weights that o does without, at most epsilon; NaN
  // where weights are, unless nothing is left out.
  Rows bound;
  // Written if it is there, bool: whether a row keeps the values of 64 keys, counted from the first valid one, of which
  // it sees any.
  Pairs kept;
};

// A problem of f32, bf16 or f16 without dropout and log decays, its pattern placed as lists of tiles. Sinks are weights
// that a row knows of. Bits of a row depend on its query, and on the keys and values that it sees, alone. Where rows of
// a block that are computed together all do without a tile, its values are not read.
void ForwardSkipping(Context& ctx, const Problem& problem, const Skips& skips);

// How it would.
struct SkippingPlan {
  const char* kernel;
  std::string target;
  int64_t workspace_bytes;  // of all threads
  int64_t lanes;            // rows computed together
  KeyGrid grid;
};
SkippingPlan PlanSkipping(const Context& ctx, const Problem& problem);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_SKIPPING_H_
