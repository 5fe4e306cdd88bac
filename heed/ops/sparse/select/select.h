// Selectors: patterns chosen by content, for each row.
//
// Each reads queries and keys and returns a pattern for attention with them. Positions are those of attention: row i of
// the call has p_i = start + i. A selection has no gradient: train through attention with the pattern.
//
//   TopBlocks      the `count` best blocks of keys of each row      MoBA, Quest
//   Cumulative     the fewest that hold a fraction of the softmax   FlexPrefill, SpargeAttn
//   VerticalSlash  columns and diagonals, by the last queries       MInference
//   Indexer        the `count` best keys of each row                DSA
//
// Larger scores come first, ties go to the lower index; a NaN counts as -inf. Scores, and so selections, do not depend
// on threads, other batch entries, padding, strides, or the split of queries into calls. Products are in f32 (f64 for
// f64): scores that differ by less than their rounding may be ordered differently on different SIMD targets.
//
// All throw InvalidArgument, naming the argument, if a rank, shape, dtype, device or stride disagrees with what is said
// here or an option is out of range.
#ifndef HEED_OPS_SPARSE_SELECT_SELECT_H_
#define HEED_OPS_SPARSE_SELECT_SELECT_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/patterns/pattern.h"
#include "heed/state/kv_view.h"

namespace heed::select {

// Heads that select together: the query heads of a key head, by the sum of their scores, or each query head alone.
enum class Share { kGroup, kHead };

// The score of a block for a query: <q, mean of k>, as in MoBA; or sum_d max(q_d min k_d, q_d max k_d), an upper bound
// of <q, k> in the block, as in Quest.
enum class Score { kMean, kBox };

// The candidates of each row. Block b is keys [b block, (b + 1) block) that exist. Blocks without a valid key are no
// candidates, and scores use only valid keys.
//
// A row's own block, which contains p_i, is kept. Under `causal` the other candidates are the whole blocks before it;
// else all blocks.
struct BlockOptions {
  int64_t block = 64;  // keys of a block
  bool causal = true;  // a row selects among blocks before its own
  int64_t sinks = 0;   // first blocks with valid keys, kept in addition to the selected ones
  int64_t local = 1;   // blocks up to and including the row's own, kept in addition to the selected ones
  Share share = Share::kGroup;

  attention::Align align = attention::Align::kBottomRight;  // position of query 0: Tk - Tq, or 0
  ConstTensorView query_starts;                             // [B] i64: position of query 0, before `align`
  ConstTensorView key_lengths;                              // [B]: keys at or beyond it are not valid
  ConstTensorView key_starts;                               // [B]: keys before it are not valid
};

struct TopBlocksOptions : BlockOptions {
  int64_t count = 0;  // blocks that a row keeps, including its own, without `sinks` and the other `local` blocks
  Score score = Score::kMean;
};

// The best blocks of each row: patterns::RowBlocks of [B, Tq, Hkv, n], with Hq heads for Share::kHead. If count * block
// >= Tk, every row keeps all keys that `causal` lets it see.
//
//   q  [B, Tq, Hq, D], k  [B, Tk, Hkv, D]: one dtype, f64, f32, bf16 or f16; the last axis is contiguous, the others
//   have any strides.
//
// Cost: one pass over k, 2 D flops per row and block (4 D for boxes), and about 1 ns per row and block for the
// selection. Memory: D floats per block (2 D for boxes), and 64 rows of scores per thread.
//
// Source: Lu et al., "MoBA: mixture of block attention for long-context LLMs", arXiv:2502.13189; Tang et al., "Quest:
// query-aware sparsity for efficient long-context LLM inference", arXiv:2406.10774.
HEED_API Pattern TopBlocks(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                           const TopBlocksOptions& options);

// Selects for queries of the tokens appended last to a cache with a sketch, for attention::Attend() with them: row i
// has the previous length plus i as position. Blocks are multiples of 64 keys, and the cache's statistics are read
// instead of the keys; selections in blocks of 64 equal those of a tensor of the same keys. Positions and lengths are
// known to the cache and refused as options.
HEED_API Pattern TopBlocks(Context& ctx, const ConstTensorView& q, const KVView& cache,
                           const TopBlocksOptions& options);

struct CumulativeOptions : BlockOptions {
  double mass = 0.95;  // in (0, 1]
};

// The fewest blocks that hold a fraction `mass` of a row's pooled softmax, including the one that crosses it: the
// softmax of D^-1/2 <q, mean of k> over all blocks of the row except its own, with Share::kGroup the mean over its
// heads. The blocks kept by `sinks` and `local` count towards the fraction. Rows keep different numbers of blocks. q,
// k, memory and cost are those of TopBlocks, with an exponential per row, head and block.
//
// Source: Lai et al., "FlexPrefill", arXiv:2502.20766, without its selection of a pattern per head.
HEED_API Pattern Cumulative(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                            const CumulativeOptions& options);

// Chooses from a cache with a sketch, as TopBlocks() does.
HEED_API Pattern Cumulative(Context& ctx, const ConstTensorView& q, const KVView& cache,
                            const CumulativeOptions& options);

struct VerticalSlashOptions {
  int64_t verticals = 1000;  // columns that each head keeps
  int64_t slashes = 6096;    // distances p - j that each head keeps
  int64_t last = 64;         // last queries that determine the selection
  int64_t sinks = 30;        // first columns, which are selected first
  int64_t local = 100;       // smallest distances, which are selected first
};

// Columns and diagonals with the most weight in the causal attention of the last queries, for each query head: pairs j
// <= p_i where j is one of the columns, or p_i - j one of the distances. Query i has position Tk - Tq + i. q and k are
// as for TopBlocks. The pattern has no expression that Parse() reads, and fits any call with B sequences and Hq heads.
//
// Cost: 4 D flops and 2 exponentials per key and each of the last queries, and 2 floats per key and head.
//
// Source: Jiang et al., "MInference 1.0", arXiv:2407.02490.
HEED_API Pattern VerticalSlash(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                               const VerticalSlashOptions& options);

struct IndexerOptions {
  int64_t count = 2048;  // keys per row
  bool causal = true;    // a row selects among keys whose last token is at or before its position
  int64_t ratio = 1;     // tokens per key: key c consists of tokens [c ratio, (c + 1) ratio)

  std::optional<int64_t> start;  // position of query 0; default Tk - Tq; needed by `causal` if ratio > 1
};

// The keys with the largest sum_h w_h relu(<q_h, k>) of each row: patterns::Keys of [B, Tq, n], for all heads of
// attention.
//
//   q        [B, Tq, Hi, Di], k  [B, Tk, Di], weights  [B, Tq, Hi]: one dtype
//
// Query i has position start + i. Cost: 2 Hi Di flops per row and key. Memory: a copy of k, and 8 rows of scores per
// thread.
//
// Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556. With ratio > 1, CSA of DeepSeek-V4.
HEED_API Pattern Indexer(Context& ctx, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& weights, const IndexerOptions& options);

// Each selects as its namesake, written for reading: scalar, single-threaded, in double, by sorting.
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
