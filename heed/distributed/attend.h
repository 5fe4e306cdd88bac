// Attention to caches that the processes of a group hold, of which each has a part of the keys of every sequence.
#ifndef HEED_DISTRIBUTED_ATTEND_H_
#define HEED_DISTRIBUTED_ATTEND_H_

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/distributed/group.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_view.h"

namespace heed::distributed {

// attention::Attend to the keys of all ranks, in the order of ranks. All ranks give the same q, whose rows are the last
// tokens: their keys are in the cache of the last rank. Each computes the result of its own keys, receives those of the
// others, and merges them by their log-sum-exps; each has the whole result.
//
// Options are scale, causal, softcap, sinks, precision and invariant, the same on every rank.
//
// Reproducibility. The result is the same on every rank, and agrees with that of one cache up to rounding.
//
// Cost. That of Attend on the keys here; size B Hq Tq (Dv + 1) numbers are received, whatever the number of keys.
//
// Throws on every rank, before a result is sent and with nothing written, if calls differ or if one rank's arguments
// are refused: InvalidArgument, or on the rank that refused them what attention::Attend throws; Unsupported for other
// options, for rings, and for caches with log decays or with rotary encoding, whose positions count from their own
// first token.
HEED_API void Attend(Context& ctx, const Group& group, const KVView& cache, const ConstTensorView& q,
                     const attention::Options& options, const attention::Outputs& out);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_ATTEND_H_
