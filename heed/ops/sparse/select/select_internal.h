// Common parts of the files of selectors: checked calls, and the passes of each SIMD target.
#ifndef HEED_OPS_SPARSE_SELECT_SELECT_INTERNAL_H_
#define HEED_OPS_SPARSE_SELECT_SELECT_INTERNAL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/sparse/select/select.h"
#include "heed/state/kv_view.h"

namespace heed::select {

// Blocks per panel: several vectors on every target.
inline constexpr int64_t kPanel = 64;
inline int64_t Panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// A call that selects blocks. The blocks of a sequence count from the first that has a valid key.
struct BlockCall {
  softmax::Problem problem;       // of q and k; its sequences give the positions of rows and the valid keys
  const KVView* cache = nullptr;  // owner of the keys, or null if the problem has them
  int64_t Tq = 0, block = 64, sinks = 0, local = 1;
  bool causal = true, by_head = false, box = false;
  int64_t count = 0;                   // for TopBlocks
  double mass = 0;                     // for Cumulative
  std::vector<int64_t> first, blocks;  // per sequence
  int64_t most_blocks = 0;             // largest number of blocks of a sequence

  int64_t heads() const { return by_head ? problem.query_heads : problem.key_heads; }
  int64_t heads_per_choice() const { return by_head ? 1 : problem.group(); }
  int64_t features() const { return box ? 2 * problem.depth : problem.depth; }

  template <class S>
  const S* Key(int64_t b, int64_t token, int64_t head) const {
    if (cache == nullptr) {
      const softmax::Rows& k = problem.k;
      return static_cast<const S*>(k.data) + b * k.batch_stride + token * k.token_stride + head * k.head_stride;
    }
    const std::byte* page = cache->pages[b][token / cache->page_tokens];
    const PageRows& k = cache->key;
    return reinterpret_cast<const S*>(page + k.begin + head * k.head_stride +
                                      token % cache->page_tokens * k.token_stride);
  }
  // The cache's statistics of the keys [token, token + 64), or null.
  const std::byte* Known(int64_t b, int64_t token, int64_t head) const {
    if (cache == nullptr || token % SketchBlocks::kTokens != 0) return nullptr;
    return cache->sketch.At(cache->pages[b][token / cache->page_tokens], head, token % cache->page_tokens);
  }
};

// The blocks [0, count) that a row may keep, the index of its own block among all, and whether that is one of them.
struct RowBlocks {
  int64_t count = 0, at = 0;
  bool has_own = false;
};
inline RowBlocks BlocksOfRow(const BlockCall& c, int64_t sequence, int64_t row) {
  const int64_t p = c.problem.sequences[static_cast<size_t>(sequence)].start + row;
  const int64_t all = c.blocks[static_cast<size_t>(sequence)];
  const int64_t at = (p < 0 ? (p + 1) / c.block - 1 : p / c.block) - c.first[static_cast<size_t>(sequence)];
  return {c.causal ? std::clamp<int64_t>(at + 1, 0, all) : all, at, at >= 0 && at < all};
}

// Writes the blocks that a row keeps whatever their scores are, possibly with duplicates; returns their number, at most
// twice the number of blocks. Its own comes first.
inline int64_t KeptAnyway(const BlockCall& c, const RowBlocks& row, int64_t* kept) {
  int64_t n = 0;
  if (row.has_own) kept[n++] = row.at;
  for (int64_t i = 0; i < std::min(c.sinks, row.count); ++i) kept[n++] = i;
  const int64_t last = std::min(row.at, row.count) - 1;
  for (int64_t i = last; i >= 0 && row.at - i < c.local; --i) kept[n++] = i;
  return n;
}

// A call that selects keys.
struct IndexerCall {
  DType dtype = DType::kF32;
  softmax::Rows q, k, weights;
  int64_t B = 0, Tq = 0, Tk = 0, heads = 0, depth = 0, count = 0;
  bool causal = true;
  int64_t start = 0, ratio = 1;
};

// The passes of each SIMD target. An index has the blocks or keys of each row, `width` at most, ascending, preceded by
// -1 for missing ones.
struct Passes {
  void (*top_blocks)(Context& ctx, const BlockCall& call, int64_t width, int64_t* index);
  // Writes `words` words of bits for each row and head, one bit per block.
  void (*cumulative)(Context& ctx, const BlockCall& call, int64_t words, uint64_t* chosen);
  void (*indexer)(Context& ctx, const IndexerCall& call, int64_t width, int64_t* index);
};
Passes PassesF32(const Context& ctx);  // also used for 16-bit tensors, which are widened
Passes PassesF64(const Context& ctx);
inline Passes PassesFor(const Context& ctx, DType dtype) {
  return dtype == DType::kF64 ? PassesF64(ctx) : PassesF32(ctx);
}

// Checks the arguments of a call and returns it. Throws InvalidArgument.
BlockCall Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k, const TopBlocksOptions& options);
BlockCall Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k, const CumulativeOptions& options);
BlockCall Checked(const char* op, const ConstTensorView& q, const KVView& cache, const TopBlocksOptions& options);
BlockCall Checked(const char* op, const ConstTensorView& q, const KVView& cache, const CumulativeOptions& options);
softmax::Problem Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k,
                         const VerticalSlashOptions& options);
IndexerCall Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& weights,
                    const IndexerOptions& options);

// The largest number of blocks that a row of TopBlocks keeps.
int64_t MostKept(const BlockCall& call);

}  // namespace heed::select

#endif  // HEED_OPS_SPARSE_SELECT_SELECT_INTERNAL_H_
