// Sums of log decays, of which forgetting attention adds one to each logit.
//
//   F(p, j) = sum of the log decays at j < s <= p,  0 if j >= p
//
// One running sum C with F = C(p) - C(j) would lose, near the diagonal, what C has of digits before
// the point. So keys are cut into tiles of 64, and F is a sum of two parts of one sign,
//
//   F(p, j) = (C(p) - C(end of j's tile)) + (sum over j < s <= end of j's tile)
//
// where nothing cancels: the second is added up on its own, and C is a pair of doubles, whose
// difference is right to the last bit of one. Where p is inside of j's tile, its log decays are
// added up backwards from p. Both parts depend on nothing but p, j and the log decays before p.
//
// A log decay of -inf forgets all keys before it, NaN makes F NaN where it is a part of it: C counts
// both instead of adding them, so that keys after them are what they were.
#ifndef HEED_ENGINES_SOFTMAX_DECAYS_H_
#define HEED_ENGINES_SOFTMAX_DECAYS_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"

namespace heed::softmax {

// Gives each sequence its part of the tables.
void LayOutDecays(Problem* problem);

// What the tables take.
int64_t DecayBytes(const Problem& problem);

// Fills the tables, which stand in ctx.Tables().
void SumDecays(Context& ctx, Problem* problem);

// Entries of one query head of a sequence: its valid keys, up to whole tiles.
inline int64_t DecayEntries(const Sequence& s) {
  return (s.key_end - s.key_begin + kTileKeys - 1) / kTileKeys * kTileKeys;
}

// Where those of a head begin.
inline int64_t FirstDecay(const Sequence& s, int64_t head) { return s.first_decay + head * DecayEntries(s); }

double LogDecay(const Problem& problem, const Sequence& sequence, int64_t head, int64_t key);

// The sum over keys below `end`, where a tile ends.
WideSum SumUntil(const Problem& problem, const Sequence& sequence, int64_t head, int64_t end);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_DECAYS_H_
