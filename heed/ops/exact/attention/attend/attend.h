// Attention of new queries over a cache of keys and values: decoding, chunked prefill and
// drafts of several tokens.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_H_

#include <cstdint>
#include <span>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_view.h"

namespace heed::attention {

// Attention as Forward() computes it, where K and V are the rows of `cache`:
//
//   q    [B, Tq, Hq, D]    D is the cache's dim, Hq a multiple of its heads; the cache's dtype
//   o    [B, Tq, Hq, Dv]
//   lse  [B, Hq, Tq]       may be absent
//
// Row i of sequence b has position lengths[b] - appended[b] + i: append the keys of the new tokens first, then attend
// with their queries. Rows at or beyond appended[b] see no key, so o = 0 and lse = -inf there; at least one sequence
// must have Tq appended rows. Tk in the description of an option is the longest of the lengths.
//
// Drafts. With `tree`, [Tq], row i is a node of a tree of draft tokens, and tree[i] is its parent: an earlier row, or
// -1 for a root. Its position is lengths[b] - appended[b] + depth(i). Among the appended tokens it sees its ancestors
// and itself, each at the position that it would have in a sequence of its own, so a row is bitwise equal to decoding
// its branch alone. A sequence with fewer appended rows has the first nodes of the tree.
//
// Rotary encoding. If the cache has one, pass q unrotated: each row is rotated by its position. For a ring that rotates
// keys by their index in the cache, every call copies and rotates the keys, O(tokens in the ring), and after the first
// eviction several new rows cost as much as the same rows one by one; `causal` and a window within that of the ring are
// required, and prefix, chunk, segments, key_starts, mask, bias and alibi are refused. A tree is refused with rotary:
// its keys would have to be rotated by their depths, by the caller.
//
// Options. All are taken except dropout and those that give positions and lengths, which the cache knows (query_starts,
// align, key_lengths, query_lengths, cu_seqlens_*). Set `causal` for decoding; without it every row sees all of the
// cache. A ring requires `causal` and a window within its own.
//
// Cost. One pass over the visible keys and values, whatever the number of query heads, for up to eight rows per key
// head (Tq Hq / heads), or 16 for int8 on AMX; beyond that one pass per block of rows as in Forward(). With few heads
// the keys are split among threads (split-KV). Tokens that all sequences share (KVCache::Share), and with a tree those
// before the draft, are read once per eight rows of any sequence, in whole segments of 512, unless a mask or segments
// are given; with more than 16 new tokens per sequence, or with key_starts, this holds for a tree alone. The softmax
// states of the segments then take workspace.
//
// Reproducibility. Results are bitwise equal to Forward() with `invariant` on the same rows, whatever the kind of cache
// and its pages.
//
// Quantised caches. K and V are the stored rows, s_kj k_j and s_vj v_j with int8 k_j
// and v_j: logit j is (scale s_kj) <q, k_j>, the output sum_j (P_j s_vj) v_j, in f32. QuantizationBound() bounds the
// error of quantisation itself. There is no backward pass.
//
// Throws InvalidArgument as Forward() does, and if Tq is more than every appended[b]; nothing
// has been written then.
HEED_API void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                     const Outputs& out, std::span<const int64_t> tree = {});

// Returns what Attend would do: its kernel and cost.
HEED_API Explanation ExplainAttend(const Context& ctx, const KVView& cache, const ConstTensorView& q,
                                   const Options& options, std::span<const int64_t> tree = {});

// Bounds the distance of Attend's results from attention over the rows that were appended, before a quantised cache
// rounded them:
//
//   logit   delta = max_ij |scale| |q_i|_1 s_kj / 2
//   output  (e^(2 delta) - 1) max_j |v_j| + max_j s_vj / 2
//
// the largest over all heads of all sequences. The rounding error of the computation is additional. Reads
// every scale of the cache and q once, O(tokens heads). Source: each element moves by at most
// half a scale, and each weight by a factor of at most e^(2 delta).
//
// Throws InvalidArgument as Attend does, and for a cache that is not quantised.
struct Bound {
  double logit = 0, output = 0;
};
HEED_API Bound QuantizationBound(const Context& ctx, const KVView& cache, const ConstTensorView& q,
                                 const Options& options);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_H_
