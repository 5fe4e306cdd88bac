// Patterns: the keys that each row of sparse attention attends to.
//
// A pattern is an immutable set of pairs (p, j) of a query's position p and a key j. Both are absolute:
// query i of a call has position p = start + i, with attention's start. Keys count from 0, whatever
// key_starts says, up to Tk. Neighbours outside [0, Tk) do not exist. Sets are combined by | (union) and &
// (intersection). No builder is causal by itself.
#ifndef HEED_PATTERNS_PATTERN_H_
#define HEED_PATTERNS_PATTERN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed {

namespace patterns {
class Node;
}

// A pattern, cheap to copy. Its lists for a call are compiled once per pattern and shape.
class HEED_API Pattern {
 public:
  Pattern() = default;  // absent: every pair is kept
  explicit Pattern(std::shared_ptr<const patterns::Node> node) : node_(std::move(node)) {}

  // Parses an expression, as ToString() writes it: builders by name with arguments by position or by name, `|`, `&`,
  // which binds tighter, and parentheses: "longformer(512, [0]) | dilated(8, 64)". Throws InvalidArgument that gives
  // the place in the expression and what was expected there. Expressions have at most 1 MiB, 64 levels and numbers
  // below 2^62.
  static Pattern Parse(std::string_view expression);

  // An expression of the same set. Tables of more than 4096 numbers are written as their shapes, which Parse() refuses.
  std::string ToString() const;

  bool present() const { return node_ != nullptr; }
  const std::shared_ptr<const patterns::Node>& node() const { return node_; }

  // True if both were built by the same calls.
  friend HEED_API bool operator==(const Pattern& a, const Pattern& b);
  friend HEED_API Pattern operator|(const Pattern& a, const Pattern& b);
  friend HEED_API Pattern operator&(const Pattern& a, const Pattern& b);

 private:
  std::shared_ptr<const patterns::Node> node_;
};

// Builders. Sizes are at least 0, or at least 1 where 0 would have no meaning; all throw InvalidArgument with their
// name, the argument, its value and what was expected. Tables are copied: bool, or i32 or i64, any strides; an axis B
// has the size of the call's batch, or 1.
namespace patterns {

// p - left <= j <= p + right.
HEED_API Pattern SlidingWindow(int64_t left, int64_t right = 0);

// j = p + step c, |c| <= reach.
HEED_API Pattern Dilated(int64_t reach, int64_t step);

// (p - j) mod step = 0.
HEED_API Pattern Atrous(int64_t step);

// SlidingWindow(step - 1) | Atrous(step). Source: Child et al., arXiv:1904.10509.
HEED_API Pattern Strided(int64_t step);

// floor(j / block) = floor(p / block), or j mod block >= block - summary. Source: Child et al., arXiv:1904.10509.
HEED_API Pattern Fixed(int64_t block, int64_t summary);

// p or j is one of `tokens`: [n], or [B, n] by batch entry; -1 is absent.
HEED_API Pattern GlobalTokens(const ConstTensorView& tokens);

// SlidingWindow(window / 2, window / 2) | GlobalTokens(tokens). Source: Beltagy et al., arXiv:2004.05150.
HEED_API Pattern Longformer(int64_t window, const ConstTensorView& tokens);

// For each head and block of rows, `count` blocks of keys, all equally likely: the first ones of nb blocks after a
// shuffle by Philox4x32-10 with the key `seed` at the counters (i, floor(p / block), head, 2^30).
HEED_API Pattern RandomBlocks(int64_t count, int64_t block = 64, uint64_t seed = 0);

// With b = floor(p / block) of nb blocks: blocks 0 and nb - 1 keep all keys, the others keep blocks 0, b - 1, b, b + 1,
// nb - 1 and `random` of the rest, drawn as in RandomBlocks; all is kept where nb <= 5 + 2 random. Source: Zaheer et
// al., arXiv:2007.14062, its internal global construction.
HEED_API Pattern BigBird(int64_t block = 64, int64_t random = 3, uint64_t seed = 0);

// j < sinks, or p - window < j <= p. Source: Xiao et al., arXiv:2309.17453.
HEED_API Pattern Streaming(int64_t sinks, int64_t window);

// The `window` keys from s = min(max(p - floor(window / 2), 0), max(Tk - window, 0)) on. Source: Hassani et
// al., arXiv:2204.07143.
HEED_API Pattern Neighborhood(int64_t window);

// keep[floor(p / rows)][floor(j / columns)]: bool [nq, nk], [Hp, nq, nk] or [B, Hp, nq, nk] with Hp of 1, key heads or
// query heads. Pairs beyond the table are not kept.
HEED_API Pattern Blocks(const ConstTensorView& keep, int64_t rows, int64_t columns);
inline Pattern Blocks(const ConstTensorView& keep, int64_t block = 64) { return Blocks(keep, block, block); }

// Blocks in CSR form: row i has columns[row_ptr[i], row_ptr[i + 1]), ascending; row_ptr [nq + 1] or [Hp, nq + 1] from 0
// to n.
HEED_API Pattern Csr(const ConstTensorView& row_ptr, const ConstTensorView& columns, int64_t rows,
                     int64_t columns_of_block);
inline Pattern Csr(const ConstTensorView& row_ptr, const ConstTensorView& columns, int64_t block = 64) {
  return Csr(row_ptr, columns, block, block);
}

// index[b][i][h]: the blocks of keys of row i of the call, not of a position: [B, Tq, n] or [B, Tq, Hp, n] with Hp of
// 1, key heads or query heads; -1 is absent, and no block appears twice. Selectors return such patterns. If it is the
// whole pattern, attention computes rows that keep the same block together, wherever they are, and costs the kept
// pairs.
HEED_API Pattern RowBlocks(const ConstTensorView& index, int64_t block = 64);

// index[b][i][h]: the keys of row i of the call, not of a position: [B, Tq, n] or [B, Tq, Hkv, n]; -1 is absent, and no
// key appears twice. If it is the whole pattern, attention reads each row's keys in place and costs the kept pairs.
HEED_API Pattern Keys(const ConstTensorView& index);

// A pattern for each query head.
HEED_API Pattern PerHead(const std::vector<Pattern>& heads);

}  // namespace patterns

// Sizes and positions of a call. Sizes may be 0, but there is at least one head: query_heads is a multiple of
// key_heads.
struct PatternCall {
  int64_t Tq = 0, Tk = 0;
  int64_t query_heads = 1, key_heads = 1;
  std::vector<int64_t> starts;  // position of row 0 of each batch entry
  int64_t batch = 0;            // batch entry of starts[0], where a call is processed entry by entry
  int64_t batches = -1;         // batch entries of the whole call; -1: the size of starts
};

// keep[batch, heads, Tq, Tk], bool: the kept pairs, only those with j <= p if `causal`. Throws InvalidArgument if the
// pattern does not fit the call, or a size of the call is invalid.
HEED_API void Mask(const Pattern& pattern, const PatternCall& call, bool causal, const TensorView& keep);

// The fraction of kept pairs among all Tq Tk, or among those with j <= p; 0 if there is no pair.
HEED_API double Density(const Pattern& pattern, const PatternCall& call, bool causal);

}  // namespace heed

#endif  // HEED_PATTERNS_PATTERN_H_
