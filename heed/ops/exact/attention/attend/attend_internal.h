// Common parts of Attend() and other mechanisms over caches: construction of the problem and checks of queries.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_INTERNAL_H_

#include <initializer_list>
#include <string_view>

#include "heed/core/tensor.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/state/kv_view.h"

namespace heed::attention {

// Checks every argument of a call without a tree or a pattern and returns its problem. Queries are already rotated: the
// cache rotates none. The problem points into the cache. Throws InvalidArgument; writes nothing.
softmax::Problem AttendProblem(const char* op, const KVView& cache, const ConstTensorView& q, const Options& options,
                               const Outputs& out);

// Throws for options that the cache determines itself or that decoding does not support, except those in `taken`.
void CheckCacheOptions(const Check& check, const Options& options, std::initializer_list<std::string_view> taken = {});

// Throws InvalidArgument unless q holds queries of the tokens appended last: [batch, T, a multiple of heads, dim] in
// the cache's dtype, with contiguous rows.
void CheckCacheQueries(const char* op, const KVView& cache, const ConstTensorView& q);

// Throws InvalidArgument unless the cache stores a sketch of its keys.
void CheckSketch(const char* op, const KVView& cache);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_INTERNAL_H_
