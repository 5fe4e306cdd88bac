// Attention that skips the values of keys with negligible probability, with an upper bound of what was skipped.
//
// All logits are computed. As the online softmax passes over tiles of keys, a row skips P V of a tile if everything
// that it has skipped so far, this tile included, is at most epsilon of the softmax sum known by then; the budget
// epsilon is released evenly over the row's keys. The tiles that a row keeps are computed as if there were no others.
#ifndef HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_H_
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_H_

#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"

namespace heed::softmax {

struct Skips {
  double epsilon = 0;  // between 0 and 1, both excluded
  // Optional output, f32: an upper bound of the share of the row's probability that o lacks, at most epsilon. It is NaN
  // where probabilities are NaN, unless nothing is skipped.
  Rows bound;
  // Optional output, bool: whether a row keeps the values of each block of 64 keys, counted from the first valid key,
  // of which it sees any.
  Pairs kept;
};

// Runs attention with skips. The problem is f32, bf16 or f16, without dropout and log decays, and its pattern is given
// as tile lists. A learned sink counts as known probability. The bits of a row depend only on its query and on the keys
// and values that it sees. Where all rows of a block skip a tile, the tile's values are not read.
void ForwardSkipping(Context& ctx, const Problem& problem, const Skips& skips);

// The kernel and the memory that ForwardSkipping would use.
struct SkippingPlan {
  const char* kernel;
  std::string target;
  int64_t workspace_bytes;  // of all threads
  int64_t lanes;            // rows computed together
  KeyGrid grid;
};
SkippingPlan PlanSkipping(const Context& ctx, const Problem& problem);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKIPPING_H_
