// The keys that a row sees, key by key: all masks together.
#ifndef HEED_ENGINES_SOFTMAX_SEEN_KEYS_H_
#define HEED_ENGINES_SOFTMAX_SEEN_KEYS_H_

#include <cstdint>

#include "heed/engines/softmax/key_runs.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

// Returns the keys [begin, begin + 64) that a row sees, one bit each. `runs` are its intervals; segments, the mask, a
// placed pattern and biases of -inf are taken into account.
uint64_t SeenBits(const Problem& problem, const Sequence& sequence, int64_t head, int64_t query, const KeyRuns& runs,
                  int64_t begin);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_SEEN_KEYS_H_
