// Mechanisms with states over a sequence that the processes of a group hold in parts.
//
// Each rank gives and receives its part of the tokens, in the order of ranks. Parts may have any sizes, 0 included.
// `lengths`, `starts` and `cu_seqlens` are those of the whole sequence, the same on every rank.
//
// A sequence is cut into segments, at multiples of `segment` tokens and between ranks. Each rank summarises its
// segments (heed/mechanism/structs.h), all ranks receive all summaries and compose the states before their own, and
// then compute outputs. Gradients of states pass through the same transitions in the reverse order.
#ifndef HEED_DISTRIBUTED_SEQUENCE_H_
#define HEED_DISTRIBUTED_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/distributed/group.h"
#include "heed/ops/mechanisms.h"

namespace heed::distributed {

// States that Forward computed, which Backward of the same call reads instead of computing them again.
class HEED_API SequenceStates {
 public:
  struct Content;

  SequenceStates();
  ~SequenceStates();
  SequenceStates(SequenceStates&& other) noexcept;
  SequenceStates& operator=(SequenceStates&& other) noexcept;

  std::unique_ptr<Content>& content() { return content_; }

 private:
  std::unique_ptr<Content> content_;
};

struct SequenceOptions {
  int64_t segment = 4096;  // tokens per segment, >= 1
  // Each rank waits for the states of the one before it. Where parts begin at multiples of 64 tokens, outputs and
  // states then have the bits of one process. h3, mamba3, precond_delta_rule and precond_kda are always relayed.
  bool relay = false;
  SequenceStates* states = nullptr;  // written by Forward, read by Backward; on all ranks or on none
  std::string note = {};             // a part of the call that ranks compare too
};

// <name>::Forward and <name>::Backward of the whole sequence.
//
//   initial    on rank 0, or with `reverse` on the last rank, which then has tokens; absent on the others
//   final      computed on each rank whose outputs have it
//   d_final    the sum over the ranks that give it
//   gradients  those of tokens are this rank's; those of tensors without tokens are this rank's part of the sum
//
// Reproducibility. States depend on where the sequence is cut and on nothing else: groups of any size that cut at the
// same tokens have the same bits. They agree with those of one process up to rounding, or to the bit with `relay`.
//
// Throws on every rank, before any tensor is sent and with nothing written, if the call of one rank differs from that
// of rank 0 in more than its tokens, or if one rank's arguments are refused: InvalidArgument, or on the rank that
// refused them what <name>::Forward throws. Unsupported for calls without causality and for tensors on a GPU. What the
// transport throws is passed on; outputs are then undefined.
#define HEED_DISTRIBUTED_PASSES(name)                                                                           \
  HEED_API void Forward(Context& ctx, const Group& group, const name::Inputs& in, const name::Options& options, \
                        const name::Outputs& out, const SequenceOptions& sequence = {});                        \
  HEED_API void Backward(Context& ctx, const Group& group, const name::BackwardInputs& in,                      \
                         const name::Options& options, const name::Gradients& out,                              \
                         const SequenceOptions& sequence = {});
#define HEED_DISTRIBUTED_MECHANISMS(of)                                                                               \
  of(linear_attention) of(performer) of(based) of(retention) of(lightning) of(simple_gla) of(gla) of(hgrn2) of(mlstm) \
      of(rwkv4) of(rwkv5) of(rwkv6) of(delta_rule) of(gated_delta_rule) of(kda) of(gdn2) of(comba) of(delta_product)  \
          of(rwkv7) of(ssd) of(hgrn) of(rg_lru) of(selective_scan) of(s4d) of(h3) of(causal_conv1d)                   \
              of(precond_delta_rule) of(precond_kda) of(mamba3)
HEED_DISTRIBUTED_MECHANISMS(HEED_DISTRIBUTED_PASSES)
#undef HEED_DISTRIBUTED_PASSES

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_SEQUENCE_H_
