// Attention of new queries over keys and values in pages that another library owns, where they are: on the CPU or a
// GPU.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PAGES_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PAGES_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {

// Attention as Forward() computes it, K and V of sequence b being the rows of its pages, of which it has lengths[b]:
//
//   q    [B, Tq, Hq, D]    D being that of k_pool, Hq a multiple of its heads, in its dtype
//   o    [B, Tq, Hq, Dv]
//   lse  [B, Hq, Tq]       may be absent
//
// The last of them are the keys of the queries: row i of sequence b stands at lengths[b] - n[b] + i, where n[b] is
// query_lengths[b], or Tq without. Rows at or beyond n[b] see nothing. With cu_seqlens_q queries are packed, [Tq_total,
// Hq, D], n[b] being what it says. Where an option speaks of Tk, it is the longest of the lengths, packed their sum.
//
// Pools, q, o, lse, mask and bias are on one device, or all on the CPU; indptr, indices and last_page_len are on the
// CPU always and are checked before anything is computed. They are read by the call alone: for a GPU they travel with
// launches, 8 bytes a page, and nothing is waited for. Both pools' pages begin equally many bytes apart. What no
// sequence refers to is not read.
//
// Options. All but those that say where rows are, but for query_lengths and cu_seqlens_q, log_decay and dropout; on a
// GPU what Forward() takes there. Callers that decode set `causal`; without it every row sees all of its sequence.
//
// Reproducibility. The bits are, on a GPU, those of Forward() on the same rows, however they lie in pages; on the CPU
// those of Attend() over a KVCache with the same rows.
//
// Throws InvalidArgument as Forward() and KVCache::Import() do, and Unsupported as Forward(); nothing has been written
// then.
HEED_API void AttendPages(Context& ctx, const KVCache::BlockTables& tables, const ConstTensorView& q,
                          const Options& options, const Outputs& out);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PAGES_H_
