// Attention to keys and values that move from rank to rank.
#ifndef HEED_DISTRIBUTED_ATTENTION_INTERNAL_H_
#define HEED_DISTRIBUTED_ATTENTION_INTERNAL_H_

#include <vector>

#include "heed/core/context.h"
#include "heed/distributed/group.h"
#include "heed/distributed/shards.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::distributed {

// Method::kRing of calls on which all ranks agree. `parts` are the tokens of each rank, in their order. Options beside
// causality, windows, soft cap, scale, key lengths and precision are absent.
void RingForward(Context& ctx, const Group& group, const std::vector<TokenRange>& parts, const attention::Inputs& in,
                 const attention::Options& options, const attention::Outputs& out);
void RingBackward(Context& ctx, const Group& group, const std::vector<TokenRange>& parts,
                  const attention::BackwardInputs& in, const attention::Options& options,
                  const attention::Gradients& out);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_ATTENTION_INTERNAL_H_
