// Selectors: patterns that content chooses, a row at a time.
//
// Each reads queries and keys and returns a pattern for attention with them. Queries stand as in attention: row i of
// the call at p_i = start + i. A choice is no function with a gradient: training goes through attention with the
// pattern.
//
//   TopBlocks      the `count` best blocks of keys of each row      MoBA, Quest
//   Cumulative     as many as hold a share of the softmax           FlexPrefill, SpargeAttn
//   VerticalSlash  columns and diagonals, by the last queries       MInference
//   Indexer        the `count` best keys of each row                DSA
//
// Larger scores come first, equal ones by the lower index; a score that is NaN counts as -inf. Bits of scores, and so
// choices, do not depend on threads, batch neighbours, padding, strides, or on how queries are split into calls. They
// come from f32 products (f64 of f64): scores that differ by less than these round may change places between SIMD
// targets.
//
// All throw InvalidArgument, naming the argument, if a rank, shape, dtype, device or stride disagrees with what is said
// here or an option is out of range.
#ifndef HEED_OPS_SPARSE_SELECT_SELECT_H_
#define HEED_OPS_SPARSE_SELECT_SELECT_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/common/pattern.h"
#include "heed/state/kv_view.h"

namespace heed::select {

// Who chooses: the query heads of a key head together, by the sum of their scores, or each.
enum class Share { kGroup, kHead };

// The score of a block for a query: <q, mean of k>, of MoBA; or sum_d max(q_d min k_d, q_d max k_d), no less than any
// <q, k>, of Quest.
enum class Score { kMean, kBox };

// What rows choose blocks among. A block b is keys [b block, (b + 1) block) of those that there are. Blocks without a
// valid key are no blocks, and what is known of one is known of its valid keys.
//
// A row's own block, in which p_i lies, is kept. Under `causal` other blocks are those before it, which are whole; else
// all.
struct BlockOptions {
  int64_t block = 64;  // keys of a block
  bool causal = true;  // a row chooses among blocks before its own
  int64_t sinks = 0;   // first blocks of those with valid keys, kept besides what is chosen
  int64_t local = 1;   // blocks up to the row's own, kept: the own one, and others besides what is chosen
  Share share = Share::kGroup;

  attention::Align align = attention::Align::kBottomRight;  // where query 0 stands: at Tk - Tq, or at 0
  ConstTensorView query_starts;                             // [B] i64: position of query 0, before `align`
  ConstTensorView key_lengths;                              // [B]: keys at or beyond it are not valid
  ConstTensorView key_starts;                               // [B]: keys before it are not valid
};

struct TopBlocksOptions : BlockOptions {
  int64_t count = 0;  // of blocks that a row keeps, its own among them, without `sinks` and the others of `local`
  Score score = Score::kMean;
};

// The best blocks of each row: patterns::RowBlocks of [B, Tq, Hkv, n], of Hq heads with Share::kHead. If count * block
// >= Tk every row keeps all that `causal` lets it see.
//
//   q  [B, Tq, Hq, D], k  [B, Tk, Hkv, D]: one dtype, f64, f32, bf16 or f16, any strides but of the last axis.
//
// Cost: one pass over k, 2 D flops per row and block (4 D of boxes), and about 1 ns for each of these to choose.
// Memory: D floats per block (2 D), and per thread 64 rows of scores.
//
// Source: Lu et al., "MoBA: mixture of block attention for long-context LLMs", arXiv:2502.13189; Tang et al., "Quest:
// query-aware sparsity for efficient long-context LLM inference", arXiv:2406.10774.
HEED_API Pattern TopBlocks(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                           const TopBlocksOptions& options);

// Chooses for queries of the tokens that a cache with a sketch was given last, for attention::Attend() with them: row i
// stands at the length before, plus i. Blocks are multiples of 64 keys, of whose statistics the cache reads a few
// numbers instead of the keys; choices in blocks of 64 are those of a tensor of the same keys. The cache knows
// positions and lengths, which are no options.
HEED_API Pattern TopBlocks(Context& ctx, const ConstTensorView& q, const KVView& cache,
                           const TopBlocksOptions& options);

struct CumulativeOptions : BlockOptions {
  double mass = 0.95;  // in (0, 1]
};

// The fewest blocks that hold a share `mass` of a row's pooled softmax, the one that crosses it included: the softmax
// of D^-1/2 <q, mean of k> over all blocks of the row but its own, with Share::kGroup the mean of those of its heads.
// What `sinks` and `local` keep counts as held. Rows keep different numbers of blocks. q, k, memory and cost are those
// of TopBlocks, with an exponential per row, head and block.
//
// Source: Lai et al., "FlexPrefill", arXiv:2502.20766, without the choice of a pattern by head.
HEED_API Pattern Cumulative(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                            const CumulativeOptions& options);

// Chooses from a cache with a sketch, as TopBlocks() does.
HEED_API Pattern Cumulative(Context& ctx, const ConstTensorView& q, const KVView& cache,
                            const CumulativeOptions& options);

struct VerticalSlashOptions {
  int64_t verticals = 1000;  // columns that each head keeps
  int64_t slashes = 6096;    // distances p - j that each head keeps
  int64_t last = 64;         // queries that the choice is made by: these at the end
  int64_t sinks = 30;        // first columns, which are kept first
  int64_t local = 100;       // smallest distances, which are kept first
};

// Columns and diagonals with the most weight in the causal attention of the last queries, for each query head: pairs j
// <= p_i where j is one of the columns, or p_i - j one of the distances. Queries stand at the end, at Tk - Tq + i. q
// and k are those of TopBlocks. The pattern has no expression that Parse() reads, and fits any call with B sequences
// and Hq heads.
//
// Cost: 4 D flops and 2 exponentials per key and query of the last ones, and 2 floats per key and head.
//
// Source: Jiang et al., "MInference 1.0", arXiv:2407.02490.
HEED_API Pattern VerticalSlash(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                               const VerticalSlashOptions& options);

struct IndexerOptions {
  int64_t count = 2048;  // keys of a row
  bool causal = true;    // a row chooses among keys up to its position
};

// The keys with the largest sum_h w_h relu(<q_h, k>) of each row: patterns::Keys of [B, Tq, n], for all heads of
// attention.
//
//   q        [B, Tq, Hi, Di], k  [B, Tk, Di], weights  [B, Tq, Hi]: one dtype
//
// Queries stand at the end, at Tk - Tq + i. Cost: 2 Hi Di flops per row and key. Memory: a copy of k, and per thread 8
// rows of scores.
//
// Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556.
HEED_API Pattern Indexer(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& weights, const IndexerOptions& options);

// Each chooses as its namesake, written for reading: scalar, one thread, all in double, sorting.
HEED_API Pattern TopBlocksReference(const ConstTensorView& q, const ConstTensorView& k,
                                    const TopBlocksOptions& options);
HEED_API Pattern CumulativeReference(const ConstTensorView& q, const ConstTensorView& k,
                                     const CumulativeOptions& options);
HEED_API Pattern VerticalSlashReference(const ConstTensorView& q, const ConstTensorView& k,
                                        const VerticalSlashOptions& options);
HEED_API Pattern IndexerReference(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& weights,
                                  const IndexerOptions& options);

}  // namespace heed::select

#endif  // HEED_OPS_SPARSE_SELECT_SELECT_H_
