// Patterns as arguments of Python functions.
#ifndef HEED_OPS_SPARSE_COMMON_PATTERN_PY_H_
#define HEED_OPS_SPARSE_COMMON_PATTERN_PY_H_

#include "heed/ops/sparse/common/pattern.h"
#include "python/arguments.h"

namespace heed::python {

// Each throws InvalidArgument for what is none: a heed.Pattern, or, in the schemas of PyTorch's operators, what
// stands for one.
Pattern ToPattern(const Argument& argument);
Pattern ToPatternByKey(const Argument& argument);

}  // namespace heed::python

#endif  // HEED_OPS_SPARSE_COMMON_PATTERN_PY_H_
