// Exact attention over a sequence that the processes of a group hold in parts.
#ifndef HEED_DISTRIBUTED_ATTENTION_H_
#define HEED_DISTRIBUTED_ATTENTION_H_

#include <memory>
#include <string>

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

// Tensors that Forward received, which Backward of the same call reads instead of receiving them again: keys and values
// of all tokens, or all tokens of this rank's heads. On a ring there are none.
class HEED_API AttentionReceived {
 public:
  struct Content;

  AttentionReceived();
  ~AttentionReceived();
  AttentionReceived(const AttentionReceived&) = delete;
  AttentionReceived& operator=(const AttentionReceived&) = delete;

  Content& content() { return *content_; }
  Content& Clear();

 private:
  std::unique_ptr<Content> content_;
};

struct AttentionOptions {
  Method method = Method::kAuto;
  Order order = Order::kContiguous;  // of the tokens, as ShardRanges divides them; contiguous parts may have any sizes
  bool seed_of_first = false;        // the seed of dropout is that of rank 0, whatever the others have
  AttentionReceived* received = nullptr;  // written by Forward, read by Backward; on all ranks or on none
  std::string note = {};                  // a part of the call that ranks compare too
};

// attention::Forward of the whole sequence: each rank has the queries, keys and values of its tokens, which are as
// many, and receives its rows of o and lse. Query i of the whole sequence has position i.
//
// Options are those of the whole, the same on every rank: cu_seqlens_q, which ranks may cut anywhere, lengths, starts,
// positions, patterns, and the seed of dropout, whose mask is that of the whole. mask and bias have this rank's rows,
// or one for all, and all keys; log_decay, segments_q and segments_k have this rank's tokens. Patterns that list keys
// by row of a call (RowBlocks, Keys) are refused.
//
// kUlysses requires contiguous order, numbers of heads of q and of k that the number of ranks divides, and none of
// alibi, sinks, log_decay, mask, bias, pattern and dropout, which depend on heads or rows. kRing refuses chunk,
// log_decay, pattern, dropout, and sink_tokens with key_starts.
//
// Reproducibility. o and lse have the bits of one process, except with kRing, which merges partial results, rounded at
// each, in the order in which parts arrive.
//
// Throws on every rank, before any tensor is sent and with nothing written, if the call of one rank differs from that
// of rank 0 in more than its tokens, or if one rank's arguments are refused: InvalidArgument, or on the rank that
// refused them what attention::Forward throws; Unsupported for a method that the call excludes, and for tensors on a
// GPU. What the transport throws is passed on; outputs are then undefined.
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
