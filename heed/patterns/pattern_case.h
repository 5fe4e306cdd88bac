// Random patterns that fit a call.
#ifndef HEED_PATTERNS_PATTERN_CASE_H_
#define HEED_PATTERNS_PATTERN_CASE_H_

#include <cstdint>
#include <functional>

#include "heed/patterns/pattern.h"

namespace heed::patterns {

// A pattern of up to `depth` levels of | and &; below(n) is a random number in [0, n).
Pattern RandomPattern(const PatternCall& call, int depth, const std::function<int64_t(int64_t)>& below);

}  // namespace heed::patterns

#endif  // HEED_PATTERNS_PATTERN_CASE_H_
