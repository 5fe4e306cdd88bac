// Parts of a sequence that ranks have agreed on, and the whole from all parts.
#ifndef HEED_DISTRIBUTED_SHARDS_INTERNAL_H_
#define HEED_DISTRIBUTED_SHARDS_INTERNAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "heed/distributed/group_internal.h"
#include "heed/distributed/shards.h"

namespace heed::distributed {

// Contiguous parts of these sizes.
std::vector<std::vector<TokenRange>> RangesOfCounts(const std::vector<int64_t>& counts);

// The ranges of ranks that have these numbers of tokens. Throws InvalidArgument if they are not those of the order.
std::vector<std::vector<TokenRange>> AgreedRanges(const std::string& operation, const std::vector<int64_t>& counts,
                                                  Order order);

// The whole tensor in the order of its tokens, from the parts of all ranks.
Owned Gathered(const Group& group, const ConstTensorView& part, int axis,
               const std::vector<std::vector<TokenRange>>& ranges);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_SHARDS_INTERNAL_H_
