// Certified attention: drops keys with little probability and bounds the probability that was dropped.
//
//   S      blocks of 64 keys, selected per row or group of rows so that the dropped keys have at most
//          probability epsilon
//   o      softmax attention over the keys of S
//   bound  >= tau = sum over j not in S of e^{s_j} / (sum over all j of e^{s_j} + e^{sink})
//
// with attention's logits s_j of the keys visible to the row, and e^{sink} only with sinks. tau is the dropped
// probability of the row. It changes o by tau times the distance between o and the mean of the dropped values, at most
// 2 tau max |v|. The bound holds for every input: it is not an estimate.
//
// A key k is known by an int8 sketch k^ and a bound of its error, so the logit lies in s^ +- delta (certified/sketch.h
// of the engine). The soft cap is monotonic and applies to both ends of this interval; biases and ALiBi are added to
// both. With T the sum of e^{upper end} over the dropped keys, and J the sum of e^{lower end} over S plus e^{sink},
//
//   tau <= T / (J + T) = bound <= epsilon.
//
// S begins with the first and the last block that may hold keys visible to the row, and adds blocks in descending order
// of their upper sums, ties to the lower index, until this holds. If it holds for no smaller S, S is everything and the
// bound 0.
//
// Level kSkip has no sketch, and each row and query head has its own S. All logits are computed; only the values of
// keys outside S are not read. A row processes its tiles of 64 keys (128 with bf16 dot products) in order. Let W be the
// sum of e^s over the tile in which its keys end and all tiles up to and including the current one, plus e^{sink}. The
// row drops the current tile, unless it is the last one, if the sum of e^s over all dropped tiles including it is at
// most
//
//   epsilon W (keys up to here) / (keys of the row).
//
// Keys are counted from the first that a window or chunk makes visible: earlier tiles, of sink tokens, are kept.
//
// Derivation, rounding, and limits of the guarantee: README.md.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_view.h"

namespace heed::certified_attention {

// The information that bounds keys. kAuto is kSketch, but stops selecting where little can be dropped. kBox uses the
// minimum and maximum of each channel over 64 keys instead of their sketches: it reads a sixth, and its bounds are
// nearly vacuous unless consecutive keys are similar in every channel. kSkip computes the logits themselves.
enum class Level { kAuto, kSketch, kBox, kSkip };

// Sizes: B sequences, Tq queries, Tk keys, Hq query heads, Hkv key and value heads (Hq a multiple of it; head h reads
// key head h / (Hq / Hkv)), D, Dv >= 1. One dtype for all three: f32, bf16 or f16. The last axis is contiguous; the
// others have any strides, including zero.
struct Inputs {
  ConstTensorView q;  // [B, Tq, Hq, D]: queries
  ConstTensorView k;  // [B, Tk, Hkv, D]: keys
  ConstTensorView v;  // [B, Tk, Hkv, Dv]: values
};

// All options are optional. Attention's options have the same meaning as there; two are refused:
//
//   dropout    drops pairs after the softmax, so the remaining P are no longer fractions of the row, as the bound needs
//   log_decay  at level kSkip: in f32 a logit includes sums over all later keys, whose rounding a tile cannot bound
struct Options : attention::Options {
  double epsilon = 0.02;  // largest dropped probability of a row, in [0, 1); 0 is bitwise equal to dense attention
  Level level = Level::kAuto;
};

// bound, lse and kept may be absent. N is the number of blocks of 64 keys in Tk, including a partial last one; a row's
// blocks count from key 0 of its sequence, at level kSkip from its key_starts. Packed outputs drop B.
struct Outputs {
  TensorView o;      // [B, Tq, Hq, Dv] in q's dtype
  TensorView bound;  // [B, Hq, Tq] f32
  TensorView lse;    // [B, Hq, Tq] f32: over the keys of S only
  TensorView kept;   // [B, Hkv, Tq, N] bool: S. At level kSkip [B, Hq, Tq, N]
};

// Computes o, and the other outputs where present. Rows with the same position / 64 (rounded down) share S, the union
// of the blocks they need, and so do the query heads of a key head, except at level kSkip; each row has its own bound.
//
// kAuto. Blocks are selected first for the rows of the last 64 positions and of 64 in the middle. A key head that keeps
// more than 70 % of the blocks visible to them is dense (bound 0).
//
// Edges. A row that sees no key has o = 0, lse = -inf and bound 0. A key with NaN or infinity is never dropped: the
// row's o and lse are NaN as in dense attention, and so is its bound, unless no key is dropped. A query or a sink with
// NaN, or a query with infinity, keeps all keys, with bound 0. Keys that a row does not see do not affect its bound,
// even if they are NaN. The backward pass is not implemented: a selection has no gradient.
//
// Reproducibility and precision are those of attention with a pattern, or without one for epsilon 0. S and bounds
// depend only on the queries that share S, the keys visible to them, and the SIMD target. Level kSkip does not use AMX.
// Rows before position 0, and rows 2^16 or more positions beyond those that the keys and queries need, keep all visible
// keys.
//
// Cost. The sketch is built in the call, and bounds take two exponentials per pair, so the call is no faster than dense
// attention: its purpose is the bound. Memory beyond attention's: the sketch, and up to 32 MiB. Level kSkip computes
// the first product (QK) of dense attention, adds a few percent for its bounds, and computes the second (PV) where any
// of the rows that are computed together (16 with AVX-512, 8 with AVX2) keeps a tile.
//
// Throws InvalidArgument as attention does, for an epsilon outside [0, 1), for f64, for dropout, and for log_decay at
// level kSkip. On throw, nothing has been written.
HEED_API void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out);

// Describes what Forward would run. The dropped keys depend on data, so pairs and flops are those of dense attention.
using Explanation = attention::Explanation;
HEED_API Explanation Explain(const Context& ctx, const Inputs& in, const Options& options);

// Computes o and lse over the keys of the blocks marked in `kept`, of Outputs' shape, and tau itself instead of the
// bound: written for reading, on the logits of attention::Reference(), in double. Outputs may have dtype f64.
HEED_API void Reference(const Inputs& in, const Options& options, const ConstTensorView& kept, const Outputs& out);

// Attention over a cache with a sketch, as attention::Attend() computes it, over S. The query heads of a key head share
// S, the union of the blocks they need, because their keys are read once for all of them. Level kSkip needs no sketch
// and takes caches of f32, bf16 and f16 without log decays.
//
// A row that sees no key, or is beyond the appended tokens, has o = 0, lse = -inf and bound 0. A key with NaN or
// infinity is never dropped: the row's o and lse are NaN as in dense attention, and so is its bound. A query with NaN
// or infinity keeps all keys, with bound 0.
//
// kAuto. The cache stores for each sequence and key head whether calls at this level were worthwhile: after two
// consecutive calls that kept more than 70 % of the visible blocks, 30 calls are dense (bound 0) without reading the
// sketch, and the next one selects again. So the same calls on equal caches give the same bits, but a call depends on
// earlier ones. Forks and Reorder() copy this state; a loaded cache starts without it. Sequences of at most three
// blocks are dense, which does not change the state. The other levels neither read nor change it.
//
// Reproducibility. o and lse are bitwise equal to attention::Attend() with the pattern row_blocks of S. S and bound
// depend only on the row's query, those of its group, the keys, and the SIMD target. At level kSkip they are also
// bitwise equal to Forward(), unless it uses AMX.
//
// Cost. The sketch is read once per 4 rows of a key head, D + 8 bytes per key, or the boxes once per row, 12 D bytes
// per 64 keys; then the rows of S. At level kSkip all keys are read, and values where any query of a key head keeps a
// tile; the keys of a head are not shared out among threads.
//
// Options. All options of attention::Attend() are taken. The cache knows positions and lengths and refuses the options
// for them (align, query_starts, key_lengths, query_lengths, cu_seqlens_*).
//
// Throws InvalidArgument as attention::Attend() does, for an epsilon outside [0, 1), and for a cache without a sketch
// at other levels than kSkip. On throw nothing has been written.
HEED_API void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                     const Outputs& out);

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_
