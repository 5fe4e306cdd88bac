// Choosing the best blocks of a row by their scores: what selectors and nsa share.
#ifndef HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INTERNAL_H_
#define HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"

namespace heed::patterns {

// Rooms of a row are whole vectors of the widest target.
inline constexpr int64_t kScoreRoom = 16;
inline int64_t ScoreRoom(int64_t n) { return (n + kScoreRoom - 1) / kScoreRoom * kScoreRoom; }

// Chooses among blocks [0, n): all of `always`, in which a block may come twice, and of the others the `count` with the
// largest scores. Of equal scores the lower block comes first, and NaN counts as -inf. Writes them to `chosen`,
// ascending, and returns how many they are. `scores` are used up; they and `chosen` have room for ScoreRoom(n).
// Allocates nothing.
//
// The choice is a search for the score that `count` reach, by halves of what is left of its 32 or 64 bits: about 1 ns
// per score and no less than 50 ns.
struct TopBlocks {
  int64_t (*f32)(float* scores, int64_t n, int64_t count, std::span<const int64_t> always, int32_t* chosen);
  int64_t (*f64)(double* scores, int64_t n, int64_t count, std::span<const int64_t> always, int32_t* chosen);
};
TopBlocks TopBlocksFor(const Context& ctx);

}  // namespace heed::patterns

#endif  // HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INTERNAL_H_
