// Attend() over caches with rotary encoding: queries turned by where they stand, and keys of a
// ring that turns them by their places in it.
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

// Options that have no meaning where the cache turns keys, or turns them by their places in a
// ring.
void CheckRotary(const Check& check, const KVView& cache, const Options& options, std::span<const int64_t> tree);

// Attend() for a cache with `rotary`; everything has been checked. Uses ctx.Staging(), which
// what it calls must leave alone.
void AttendRotated(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                   const Outputs& out);

// The queries of a call on such a cache as they meet its keys, in ctx.Staging(). Of a ring that turns by its own places
// there are none: its keys have to be turned too.
ConstTensorView TurnedQueries(Context& ctx, const KVView& cache, const ConstTensorView& q);

// QuantizationBound() for such a cache, of the queries as they meet the keys.
Bound RotatedBound(const KVView& cache, const ConstTensorView& q, const Options& options);

// Bytes of staging that it reserves.
int64_t RotaryBytes(const KVView& cache, const ConstTensorView& q);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_ROTARY_INTERNAL_H_
