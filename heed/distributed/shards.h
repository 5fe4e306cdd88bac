// The parts of a sequence that ranks hold, and copies of them.
#ifndef HEED_DISTRIBUTED_SHARDS_H_
#define HEED_DISTRIBUTED_SHARDS_H_

#include <cstdint>
#include <vector>

#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/distributed/group.h"

namespace heed::distributed {

// Contiguous: rank r of R holds part r of R. Zigzag: it holds parts r and 2 R - 1 - r of 2 R, one after the other, so
// that all ranks see about as many keys in causal attention.
enum class Order { kContiguous, kZigzag };

// Tokens [begin, end).
struct TokenRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

// The tokens of each rank: one range in contiguous order, two in zigzag order. Parts have nearly the same number of
// tokens, and begin at multiples of 64 where there are enough of them. Throws InvalidArgument for fewer than 0 tokens
// or 1 rank.
HEED_API std::vector<std::vector<TokenRange>> ShardRanges(int64_t tokens, int ranks, Order order);

// The number of tokens in the parts of a rank.
HEED_API int64_t CountTokens(const std::vector<TokenRange>& ranges);

// Copies this rank's part of a tensor that all ranks have, along the axis of tokens. Sends nothing. `part` has
// CountTokens(ShardRanges(tokens, group.size(), order)[group.rank()]) tokens. Throws InvalidArgument for another shape
// or dtype, and for an overlap.
HEED_API void Shard(const Group& group, const ConstTensorView& whole, int axis, Order order, const TensorView& part);

// Copies the parts of all ranks into the whole tensor, on every rank. Contiguous parts may have any sizes. Throws
// InvalidArgument on every rank if a part or a whole is refused on one of them.
HEED_API void Unshard(const Group& group, const ConstTensorView& part, int axis, Order order, const TensorView& whole);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_SHARDS_H_
