// Native sparse attention of new queries over a cache that grows: decoding, and prefill in chunks.
#ifndef HEED_OPS_SPARSE_NSA_NSA_ATTEND_H_
#define HEED_OPS_SPARSE_NSA_NSA_ATTEND_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/sparse/nsa/nsa.h"
#include "heed/state/nsa_cache.h"

namespace heed::nsa {

// nsa as Forward() computes it, where k and v are the tokens of a cache and k_cmp and v_cmp its windows:
//
//   q      [B, Tq, Hq, D]   D is the cache's dim, Hq a multiple of its heads; the cache's dtype
//   gates  [B, Tq, Hq, 3]
//   o      [B, Tq, Hq, Dv]
//
// Row i of sequence b has position lengths[b] - appended[b] + i: append the keys of the new tokens first, then attend
// with their queries. Rows at or beyond appended[b] are 0; at least one sequence must have Tq appended rows. The
// options length and stride must be those of the cache, or 0.
//
// Results equal those of Forward() over the whole sequence up to rounding, and selections are the same. Cost: that of
// Forward() for these rows only; the compressed keys are read twice. Throws InvalidArgument as Forward() does; nothing
// has been written then.
HEED_API void Attend(Context& ctx, const NSAView& cache, const ConstTensorView& q, const ConstTensorView& gates,
                     const Options& options, const TensorView& o);

}  // namespace heed::nsa

#endif  // HEED_OPS_SPARSE_NSA_NSA_ATTEND_H_
