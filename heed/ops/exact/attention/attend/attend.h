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

// Attention as Forward() computes it, K and V being the rows of `cache`:
//
//   q    [B, Tq, Hq, D]    D being the cache's dim, Hq a multiple of its heads, in its dtype
//   o    [B, Tq, Hq, Dv]
//   lse  [B, Hq, Tq]       may be absent
//
// Row i of sequence b stands at position lengths[b] - appended[b] + i: append the keys of the
// new tokens first, then attend with their queries. Rows at or beyond appended[b] see nothing,
// o = 0 and lse = -inf, but some sequence must have been given Tq rows. Where an option speaks of Tk, it is the longest
// of the lengths.
//
// Drafts. With `tree`, [Tq], row i is a node of a tree of guesses of which tree[i] is the
// parent, an earlier row, or -1 if there is none. It stands at lengths[b] - appended[b] +
// depth(i), and of the appended tokens sees its ancestors and itself, each at the position that
// it would have in a sequence of its own: a row has the bits that decoding its branch alone
// would give it. Sequences of which fewer rows were appended have the first of the nodes.
//
// With rotary, the cache says how: q is given without it, and each row is turned by where it
// stands. Of a ring that turns by its own places, keys are copied and turned for every call,
// O(tokens kept), and once sinks and window have parted, several new rows cost what they cost
// one by one; `causal` and a window within that of the ring are required, and prefix, chunk,
// segments, key_starts, mask, bias and alibi are not taken. A tree is not taken with rotary: its
// keys would have to be turned by their depths, by whoever has them.
//
// Options. All but those that say where rows are, which the cache knows (query_starts, align,
// key_lengths, query_lengths, cu_seqlens_*), and dropout. Callers that decode set `causal`;
// without it every row sees all of the cache. Of a ring, `causal` and a window within that of
// the ring are required.
//
// Cost. One pass over the keys and values that are seen, whatever the number of query heads,
// up to eight rows per key head (Tq Hq / heads), or 16 of int8 in matrix tiles; beyond that a
// pass per block of rows as in Forward(). Keys are shared out among threads where there are few heads. Tokens that all
// sequences share (KVCache::Share), and of a tree those before the draft, are read once for
// eight rows of any of them, in whole segments of 512, unless a mask or segments are given;
// with more than 16 new tokens per sequence, or key_starts, only a tree's are. States of
// segments then take workspace.
//
// Reproducibility. The bits are those of Forward() on the same rows, whatever the kind of
// cache and its pages.
//
// Quantised caches. K and V are the rows that are stored, s_kj k_j and s_vj v_j with int8 k_j
// and v_j: logit j is (scale s_kj) <q, k_j>, the output sum_j (P_j s_vj) v_j, in f32. What
// quantising itself changed is bounded by QuantizationBound(). There is no backward pass.
//
// Throws InvalidArgument as Forward() does, and if Tq is more than every appended[b]; nothing
// has been written then.
HEED_API void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                     const Outputs& out, std::span<const int64_t> tree = {});

// What Attend would do.
HEED_API Explanation ExplainAttend(const Context& ctx, const KVView& cache, const ConstTensorView& q,
                                   const Options& options, std::span<const int64_t> tree = {});

// How far the results of Attend can be from those over the rows that were appended, because
// a quantised cache has rounded them:
//
//   logit   delta = max_ij |scale| |q_i|_1 s_kj / 2
//   output  (e^(2 delta) - 1) max_j |v_j| + max_j s_vj / 2
//
// the largest over all heads of all sequences. Rounding of the computation comes on top. Reads
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
