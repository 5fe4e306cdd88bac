// Which keys a row sees, key by key: everything that masks taken together.
#ifndef HEED_ENGINES_SOFTMAX_SEEN_KEYS_H_
#define HEED_ENGINES_SOFTMAX_SEEN_KEYS_H_

#include <cstdint>

#include "heed/engines/softmax/key_runs.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

// The keys [begin, begin + 64) that a row sees, bit by bit, whose runs these are: with segments, the mask, a pattern
// that has been placed and a bias of -inf taken into account.
uint64_t SeenBits(const Problem& problem, const Sequence& sequence, int64_t head, int64_t query, const KeyRuns& runs,
                  int64_t begin);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_SEEN_KEYS_H_
