// Attend() over caches with rotary encoding: rotates queries by position, and keys of a ring by their index in it.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_ROTARY_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_ROTARY_INTERNAL_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/state/kv_view.h"

namespace heed::attention {

// Throws for options that have no meaning where the cache rotates keys, or rotates them by their index in a ring.
void CheckRotary(const Check& check, const KVView& cache, const Options& options, std::span<const int64_t> tree);

// Attend() for a cache with `rotary`; the arguments have been checked. Uses ctx.Staging(), so callees must not.
void AttendRotated(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                   const Outputs& out);

// Returns the queries rotated by their positions, in ctx.Staging(). Not defined for a ring that rotates by index, since
// its keys must be rotated too.
ConstTensorView RotatedQueries(Context& ctx, const KVView& cache, const ConstTensorView& q);

// QuantizationBound() for such a cache, from rotated queries.
Bound RotatedBound(const KVView& cache, const ConstTensorView& q, const Options& options);

// Bytes of staging memory that AttendRotated reserves.
int64_t RotaryBytes(const KVView& cache, const ConstTensorView& q);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_ROTARY_INTERNAL_H_
