// Sums of log decays. Forgetting attention (a log decay per key and head) adds one such sum to each logit:
//
//   F(p, j) = sum of the log decays at j < s <= p,  0 if j >= p
//
// With a single running sum C, F = C(p) - C(j) would lose precision near the diagonal: a small difference of large sums
// has few correct digits. So keys are divided into tiles of 64, and F is a sum of two parts of the same sign,
//
//   F(p, j) = (C(p) - C(end of j's tile)) + (sum over j < s <= end of j's tile)
//
// in which nothing cancels. The second part is summed on its own. C is a pair of doubles (WideSum), so that the first
// part is correct to the last bit of a double. Where p is inside j's tile, the log decays are summed backwards from p.
// Both parts depend only on p, j and the log decays up to p.
//
// A log decay of -inf removes all keys before it, and NaN makes every F that contains it NaN. C counts such terms
// instead of adding them, so that sums over later keys are unaffected.
#ifndef HEED_ENGINES_SOFTMAX_DECAYS_H_
#define HEED_ENGINES_SOFTMAX_DECAYS_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"

namespace heed::softmax {

// Sets each sequence's place in the tables.
void LayOutDecays(Problem* problem);

// Returns the size of the tables.
int64_t DecayBytes(const Problem& problem);

// Fills the tables, which are in ctx.Tables().
void SumDecays(Context& ctx, Problem* problem);

// Returns the number of table entries of one query head of a sequence: its valid keys, rounded up to whole tiles.
inline int64_t DecayEntries(const Sequence& s) {
  return (s.key_end - s.key_begin + kTileKeys - 1) / kTileKeys * kTileKeys;
}

// Returns where the entries of a head begin.
inline int64_t FirstDecay(const Sequence& s, int64_t head) { return s.first_decay + head * DecayEntries(s); }

double LogDecay(const Problem& problem, const Sequence& sequence, int64_t head, int64_t key);

// Returns the sum over the keys below `end`, which is the end of a tile.
WideSum SumUntil(const Problem& problem, const Sequence& sequence, int64_t head, int64_t end);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_DECAYS_H_
