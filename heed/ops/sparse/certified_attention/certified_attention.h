// Certified attention: keys that weigh little are left out, and a bound says how little they weigh.
//
//   S      blocks of 64 keys, chosen per row or rows of a group so that what is left out weighs at most epsilon
//   o      softmax attention over the keys of S
//   bound  >= tau = sum over j not in S of e^{s_j} / (sum over all j of e^{s_j} + e^{sink})
//
// with attention's logits s_j, of the keys that its options let the row see, and no e^{sink} without sinks. tau is the
// share of the row's attention that o does without. It moves o by tau times the distance between o and the mean of the
// values left out, at most 2 tau max |v|. The bound holds for every input: nothing is estimated.
//
// A key k is known by an int8 sketch k^ and a bound of its error, so the logit lies in s^ +- delta (softmax/sketch.h).
// The soft cap of either end is an end of what the soft cap makes of it, and biases and penalties are added to both.
// With T the sum of e^{upper end} over what is left out, and J that of e^{lower end} over S, and e^{sink},
//
//   tau <= T / (J + T) = bound <= epsilon.
//
// S begins with the first block and the last one that may hold keys which the row sees, and takes others in falling
// order of their upper sums, ties to the lower index, until that holds. Where it does not hold before, S is everything:
// bound 0.
//
// At level kSkip nothing is known of keys before, and each row and query head has an S of its own. All logits are
// computed, and of keys outside S values alone are not read. A row takes its tiles of 64 keys in order (128 where pairs
// of bf16 are multiplied), W being the sum of e^s over the tile in which its keys end and over all tiles up to the one
// at hand, this one included, and e^{sink}, and leaves it out, unless it is the last one, if all that has been left
// out, it included, is at most
//
//   epsilon W (keys up to here) / (keys of the row).
//
// Keys count from the first that a window or chunk lets the row see: tiles before that, of sink tokens, are kept.
//
// Derivation, rounding, and what is not promised: README.md.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_view.h"

namespace heed::certified_attention {

// By what keys are bounded. kAuto is kSketch that gives up where little can be left out. kBox takes the least and the
// greatest value of each channel in every 64 keys in place of their sketches: a sixth of the reading, and bounds that
// say next to nothing unless keys that follow each other are alike in every channel. kSkip multiplies the keys
// themselves.
enum class Level { kAuto, kSketch, kBox, kSkip };

// Sizes: B sequences, Tq queries, Tk keys, Hq query heads, Hkv key and value heads (Hq a multiple of it; head h reads
// key head h / (Hq / Hkv)), D, Dv >= 1. One dtype for all three: f32, bf16 or f16. The last axis is contiguous; the
// others have any strides, zero included.
struct Inputs {
  ConstTensorView q;  // [B, Tq, Hq, D]: queries
  ConstTensorView k;  // [B, Tk, Hkv, D]: keys
  ConstTensorView v;  // [B, Tk, Hkv, Dv]: values
};

// Everything can be left out. Options of attention mean what they mean there, but for what is refused:
//
//   dropout    draws among weights after the softmax, so that they are no shares of the row any more, which a bound is
//   of log_decay  at level kSkip: f32 adds to a logit sums over all keys behind it, of whose rounding nothing is known
//   by tiles
struct Options : attention::Options {
  double epsilon = 0.02;  // most that a row may do without, in [0, 1); 0 is dense attention, bit for bit
  Level level = Level::kAuto;
};

// bound and what follows it may be absent. N is the number of blocks of 64 keys in Tk, a last one that is not full
// included; those of a row count from key 0 of its sequence, at level kSkip from its key_starts. Packed outputs drop B.
struct Outputs {
  TensorView o;      // [B, Tq, Hq, Dv] in q's dtype
  TensorView bound;  // [B, Hq, Tq] f32
  TensorView lse;    // [B, Hq, Tq] f32: over the keys of S alone
  TensorView kept;   // [B, Hkv, Tq, N] bool: S. At level kSkip [B, Hq, Tq, N]
};

// Computes o, and what else is present. Rows whose positions have the same quotient by 64 share S, the union of what
// they need, and so do the query heads of a key head, but for level kSkip; each row has a bound of its own.
//
// kAuto. Rows of the last 64 positions and of 64 in the middle are chosen for first. A key head that keeps more than 70
// % of their visible blocks is dense (bound 0).
//
// Edges. A row that sees no key has o = 0, lse = -inf and bound 0. A key with NaN or infinity is never left out: the
// row's o and lse are NaN as in dense attention, and so is its bound, unless nothing is left out. A query or a sink
// with NaN, or a query with infinity, keeps all, with bound 0. Keys that a row does not see have no part in its bound,
// whatever they are. There is no backward pass: a choice has no gradient.
//
// Reproducibility and precision are those of attention with a pattern, and with epsilon 0 without one. S and bounds
// depend on the queries that share S and on the keys that they see alone, and on the SIMD target. At level kSkip no
// matrix tiles are used. Rows before position 0, and those that stand 2^16 and more behind what keys and queries need,
// keep what they see.
//
// Cost. The sketch is made for the call, and bounds take two exponentials per pair, so that it is no faster than dense
// attention: what it gives is the bound. Memory beyond attention's: the sketch, and up to 32 MiB. Level kSkip has the
// first half of dense attention's products, a few percent for its bounds, and the second half where any of the rows
// that are computed together (16 with AVX-512, 8 with AVX2) keeps a tile.
//
// Throws InvalidArgument as attention does, for an epsilon outside [0, 1), for f64, for dropout, and for log_decay at
// level kSkip. On throw nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// What Forward would run. What can be left out depends on data, so pairs and flops are those of dense attention.
using Explanation = attention::Explanation;
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// Computes o and lse over the keys of the blocks that are marked in `kept`, of Outputs' shape, and in place of the
// bound tau itself: written for reading, on the logits of attention::Reference(), in double. Outputs may have dtype
// f64.
HEED_API void Reference(const Inputs& in, const Options& options, const ConstTensorView& kept, const Outputs& out);

// Attention over a cache that has a sketch, as attention::Attend() computes it, over S. The query heads of a key head
// share S, the union of what they need, because its rows are read once for all of them. Level kSkip needs no sketch,
// and takes caches of f32, bf16 and f16 without log decays.
//
// A row that sees no key, or stands beyond the appended tokens, has o = 0, lse = -inf and bound 0. A key with NaN or
// infinity is never left out: the row's o and lse are NaN as in dense attention, and so is its bound. A query with NaN
// or infinity sees all, with bound 0.
//
// kAuto. A cache remembers of each sequence and key head whether calls at this level paid: after two in a row in which
// more than 70 % of the visible blocks were kept, 30 calls are dense (bound 0) without a look at the sketch, then one
// tries again. So the same calls on equal caches give the same bits, but a call depends on those before it. Forks and
// Reorder() take along what is remembered; a loaded cache begins anew. Sequences of three blocks at most are dense,
// which is not remembered. At the other levels nothing is remembered or looked up.
//
// Reproducibility. Bits of o and lse are those of attention::Attend() with the pattern row_blocks of S. S and bound
// depend on the row's query, those of its group, and the keys alone, and on the SIMD target. At level kSkip they are
// those of Forward() too, unless that takes matrix tiles.
//
// Cost. The sketch is read once per 4 rows of a key head, D + 8 bytes per key, or the boxes once per row, 12 D bytes
// per 64 keys; then the rows of S. At level kSkip all keys are read, and values where any query of a key head keeps a
// tile; the keys of a head are not shared out among threads.
//
// Options. Those that attention::Attend() takes. Those that say where rows are (align, query_starts, key_lengths,
// query_lengths, cu_seqlens_*) the cache knows, and refuses.
//
// Throws InvalidArgument as attention::Attend() does, for an epsilon outside [0, 1), and for a cache without a sketch
// at other levels than kSkip. On throw nothing has been written.
HEED_API void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                     const Outputs& out);

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_
