// Exact attention over a sequence that the processes of a group hold in parts.
#ifndef HEED_DISTRIBUTED_ATTENTION_H_
#define HEED_DISTRIBUTED_ATTENTION_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/distributed/group.h"
#include "heed/distributed/shards.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::distributed {

enum class Method {
  kAuto,       // kUlysses where it is possible, else kAllGather
  kAllGather,  // every rank receives all keys and values and computes its own rows
  kUlysses,    // ranks exchange tokens for heads, and each computes whole heads
  kRing,       // keys and values move from rank to rank, two parts in memory at a time
};

struct AttentionOptions {
  Method method = Method::kAuto;
  Order order = Order::kContiguous;  // of the tokens, as ShardRanges divides them; contiguous parts may have any sizes
};

// attention::Forward of the whole sequence: each rank has the queries, keys and values of its tokens, which are as
// many, and receives its rows of o and lse. Query i of the whole sequence has position i.
//
// Options. scale, causal, window, sink_tokens, prefix, chunk, key_lengths, key_starts, softcap, alibi, sinks, precision
// and invariant are those of the whole, the same on every rank. mask and bias have this rank's rows, or one for all,
// and all keys; log_decay has this rank's tokens. Others are refused.
//
// kUlysses requires contiguous order, numbers of heads of q and of k that the number of ranks divides, and none of
// alibi, sinks, log_decay, mask and bias, which have an axis of heads or rows. kRing requires contiguous order, and of
// the options takes scale, causal, window, key_lengths, softcap, precision and invariant.
//
// Reproducibility. o and lse have the bits of one process, except with kRing, which merges partial results, rounded at
// each, in the order in which parts arrive.
//
// Throws on every rank, before any tensor is sent and with nothing written, if the call of one rank differs from that
// of rank 0 in more than its tokens, or if one rank's arguments are refused: InvalidArgument, or on the rank that
// refused them what attention::Forward throws; Unsupported for packed sequences, for a method that the call excludes,
// and for tensors on a GPU. What the transport throws is passed on; outputs are then undefined.
HEED_API void Forward(Context& ctx, const Group& group, const attention::Inputs& in, const attention::Options& options,
                      const attention::Outputs& out, const AttentionOptions& distributed = {});

// attention::Backward of the whole sequence, from and to this rank's rows. dalibi and dsinks, and dbias where one row
// is for all, are this rank's part of the sum.
//
// Reproducibility. With kUlysses gradients have the bits of one process, with kAllGather dq. dk, dv and dlog_decay are
// then sums over ranks in their order, rounded at each. With kRing all gradients are sums over parts.
//
// Throws as Forward does.
HEED_API void Backward(Context& ctx, const Group& group, const attention::BackwardInputs& in,
                       const attention::Options& options, const attention::Gradients& out,
                       const AttentionOptions& distributed = {});

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_ATTENTION_H_
