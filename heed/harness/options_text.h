// The options of attention in one line, for people.
#ifndef HEED_HARNESS_OPTIONS_TEXT_H_
#define HEED_HARNESS_OPTIONS_TEXT_H_

#include <cstddef>
#include <string>

#include "heed/ops/exact/attention/attention.h"
#include "heed/patterns/pattern.h"

namespace heed {

// A pattern's expression, cut if it is longer than `most`.
std::string Brief(const Pattern& pattern, size_t most = 60);

// The options that differ from the default, "causal window 127,0"; "full" if there are none. A pattern is given by its
// expression, an option that holds tensors by its name. The scale, and options that change weights by rounding alone,
// are left out.
std::string ToString(const attention::Options& options);

}  // namespace heed

#endif  // HEED_HARNESS_OPTIONS_TEXT_H_
