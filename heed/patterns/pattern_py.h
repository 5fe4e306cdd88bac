// Patterns as arguments of Python functions.
#ifndef HEED_PATTERNS_PATTERN_PY_H_
#define HEED_PATTERNS_PATTERN_PY_H_

#include "heed/patterns/pattern.h"
#include "python/arguments.h"

namespace heed::python {

// Converts a heed.Pattern, or its key in the schemas of PyTorch's operators. Throws InvalidArgument for anything else.
Pattern ToPattern(const Argument& argument);
Pattern ToPatternByKey(const Argument& argument);

}  // namespace heed::python

#endif  // HEED_PATTERNS_PATTERN_PY_H_
