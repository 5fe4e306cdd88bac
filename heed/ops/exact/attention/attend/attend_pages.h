// Attention of new queries over keys and values in pages that another library owns, read in place, on the CPU or a GPU.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PAGES_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PAGES_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {

// Attention as Forward() computes it, where K and V of sequence b are the lengths[b] rows in its pages:
//
//   q    [B, Tq, Hq, D]    D is that of k_pool, Hq a multiple of its heads; the dtype of k_pool
//   o    [B, Tq, Hq, Dv]
//   lse  [B, Hq, Tq]       may be absent
//
// The last rows are the keys of the queries: row i of sequence b has position lengths[b] - n[b] + i, where n[b] is
// query_lengths[b], or Tq by default. Rows at or beyond n[b] see no key. With cu_seqlens_q queries are packed,
// [Tq_total, Hq, D], and n[b] follows from it. Tk in the description of an option is the longest of the lengths, or
// their sum for packed calls.
//
// Pools, q, o, lse, mask and bias are on one device, or all on the CPU; indptr, indices and last_page_len are always on
// the CPU and are checked before anything is computed. They are read during the call only: for a GPU they are passed
// with the launches, 8 bytes per page, without synchronisation. The pages of both pools have the same stride in bytes.
// Pages that no sequence refers to are not read.
//
// Options. All are taken except log_decay, dropout and those that give positions and lengths (query_lengths and
// cu_seqlens_q are taken); on a GPU those that Forward() takes there. Set `causal` for decoding; without it every row
// sees all of its sequence.
//
// Reproducibility. Results are bitwise equal to Forward() on the same rows on a GPU, whatever the layout of the pages,
// and to Attend() over a KVCache with the same rows on the CPU.
//
// Throws InvalidArgument as Forward() and KVCache::Import() do, and Unsupported as Forward(); nothing has been written
// then.
HEED_API void AttendPages(Context& ctx, const KVCache::BlockTables& tables, const ConstTensorView& q,
                          const Options& options, const Outputs& out);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PAGES_H_
