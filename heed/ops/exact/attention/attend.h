// Attention of new queries over a cache of keys and values: decoding, chunked prefill and
// drafts of several tokens.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_view.h"

namespace heed::attention {

// Attention as Forward() computes it, K and V being the rows of `cache`:
//
//   q    [B, Tq, Hq, D]    D being the cache's dim, Hq a multiple of its heads, in its dtype
//   o    [B, Tq, Hq, Dv]
//   lse  [B, Hq, Tq]       may be absent
//
// Row i of sequence b stands at position lengths[b] - appended[b] + i: append the keys of the
// new tokens first, then attend with their queries. Rows at or beyond appended[b] see nothing,
// o = 0 and lse = -inf. Where an option speaks of Tk, it is the longest of the lengths.
//
// With rotary, the cache says how: q is given without it, and each row is turned by where it
// stands. Of a ring that turns by its own places, keys are copied and turned for every call,
// O(tokens kept), and once sinks and window have parted, several new rows cost what they cost
// one by one; `causal` and a window within that of the ring are required, and prefix, chunk,
// segments, key_starts, mask, bias and alibi are not taken.
//
// Options. All but those that say where rows are, which the cache knows (query_starts, align,
// key_lengths, query_lengths, cu_seqlens_*), and dropout. Callers that decode set `causal`;
// without it every row sees all of the cache. Of a ring, `causal` and a window within that of
// the ring are required.
//
// Cost. One pass over the keys and values that are seen, whatever the number of query heads,
// up to eight rows per key head (Tq Hq / heads); beyond that a pass per block of rows as in
// Forward(). Keys are shared out among threads where there are few heads.
//
// Reproducibility. The bits are those of Forward() on the same rows, whatever the kind of
// cache and its pages.
//
// Throws InvalidArgument as Forward() does, and Unsupported for a quantised cache; nothing has
// been written then.
HEED_API void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q,
                     const Options& options, const Outputs& out);

// What Attend would do.
HEED_API Explanation ExplainAttend(const Context& ctx, const KVView& cache,
                                   const ConstTensorView& q, const Options& options);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_H_
