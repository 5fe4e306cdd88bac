// Selection of a row's best blocks by their scores, for selectors and nsa.
#ifndef HEED_PATTERNS_TOP_BLOCKS_INTERNAL_H_
#define HEED_PATTERNS_TOP_BLOCKS_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"

namespace heed::patterns {

// Rows are padded to whole vectors of the widest target.
inline constexpr int64_t kScoreRoom = 16;
inline int64_t ScoreRoom(int64_t n) { return (n + kScoreRoom - 1) / kScoreRoom * kScoreRoom; }

// Selects among blocks [0, n): all of `always`, which may contain duplicates, and the `count` others with the largest
// scores. Ties go to the lower block, and NaN counts as -inf. Writes them to `chosen`, ascending, and returns their
// number. `scores` are overwritten; they and `chosen` have capacity ScoreRoom(n). Allocates nothing.
//
// Bisects the 32 or 64 bits of the score that `count` blocks reach: about 1 ns per score and at least 50 ns.
struct TopBlocks {
  int64_t (*f32)(float* scores, int64_t n, int64_t count, std::span<const int64_t> always, int32_t* chosen);
  int64_t (*f64)(double* scores, int64_t n, int64_t count, std::span<const int64_t> always, int32_t* chosen);
};
TopBlocks TopBlocksFor(const Context& ctx);

}  // namespace heed::patterns

#endif  // HEED_PATTERNS_TOP_BLOCKS_INTERNAL_H_
