// The options of attention in a line, for people.
#ifndef HEED_HARNESS_OPTIONS_TEXT_H_
#define HEED_HARNESS_OPTIONS_TEXT_H_

#include <cstddef>
#include <string>

#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/common/pattern.h"

namespace heed {

// A pattern's expression: what is longer is cut.
std::string Brief(const Pattern& pattern, size_t most = 60);

// Options that differ from the default, "causal window 127,0"; a pattern is its expression, what holds tensors its
// name; "full" stands for none. Scale, and what changes no weight but by rounding, is not said.
std::string ToString(const attention::Options& options);

}  // namespace heed

#endif  // HEED_HARNESS_OPTIONS_TEXT_H_
