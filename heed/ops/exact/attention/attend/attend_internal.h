// What mechanisms over caches share with Attend(): the problem that it poses, and checks of queries.
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

// The problem of a call without a tree or a pattern, everything checked, of queries as they meet the keys: the cache
// turns none. It points into the cache. Throws InvalidArgument; writes nothing.
softmax::Problem AttendProblem(const char* op, const KVView& cache, const ConstTensorView& q, const Options& options,
                               const Outputs& out);

// Refuses what a cache knows itself, or what decoding has no use for, but for what is `taken`.
void CheckCacheOptions(const Check& check, const Options& options, std::initializer_list<std::string_view> taken = {});

// Throws InvalidArgument unless these are queries of tokens that the cache was given last: [batch, T, a multiple of
// heads, dim] in its dtype, with contiguous rows.
void CheckCacheQueries(const char* op, const KVView& cache, const ConstTensorView& q);

// Throws InvalidArgument unless the cache keeps a sketch of its keys.
void CheckSketch(const char* op, const KVView& cache);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_INTERNAL_H_
