// Certified attention: keys that weigh little are left out, and a bound says how little they weigh.
//
//   S      blocks of 64 keys, chosen per row or rows of a group so that what is left out weighs at most epsilon
//   o      softmax attention over the keys of S
//   bound  >= tau = sum over j not in S of e^{s_j} / sum over all j of e^{s_j}
//
// tau is the share of the row's attention that o does without. It moves o by tau times the distance between o and the mean
// of the values left out, at most 2 tau max |v|. The bound holds for every input: nothing is estimated.
//
// Of a key k an int8 sketch k^ is known, and a bound of its error. So the logit lies in s^ +- delta (softmax/sketch.h), and
// with T the sum of e^{s^ + delta} over what is left out, and J that of e^{s^ - delta} over S,
//
//   tau <= T / (J + T) = bound <= epsilon.
//
// S begins with the first block and the last one that the row sees, and takes others in falling order of their upper sums,
// ties to the lower index, until that holds. Where it does not hold before, S is everything: bound 0.
//
// Derivation, rounding, and what is not promised: README.md.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/state/kv_view.h"

namespace heed::certified_attention {

// By what keys are bounded. kAuto is kSketch that gives up where little can be left out.
enum class Level { kAuto, kSketch };

struct Options {
  double epsilon = 0.02;       // most that a row may do without, in [0, 1); 0 is dense attention, bit for bit
  Level level = Level::kAuto;
  std::optional<double> scale = {};  // factor of the logits, any finite value; default 1 / sqrt(D)
  bool causal = false;          // a query sees no key after its position
};

// bound and what follows it may be absent. N is the number of blocks of 64 keys, the last one included.
struct Outputs {
  TensorView o;      // [B, Tq, Hq, Dv] in q's dtype
  TensorView bound;  // [B, Hq, Tq] f32
  TensorView lse;    // [B, Hq, Tq] f32: over the keys of S alone
  TensorView kept;   // [B, Hkv, Tq, N] bool: S
};

// Attention over a cache that has a sketch, as attention::Attend() computes it, over S. The query heads of a key head
// share S, the union of what they need, because its rows are read once for all of them.
//
// A row that sees no key, or stands beyond the appended tokens, has o = 0, lse = -inf and bound 0. A key with NaN or
// infinity is never left out: the row's o and lse are NaN as in dense attention, and so is its bound. A query with NaN or
// infinity sees all, with bound 0.
//
// kAuto. A cache remembers of each sequence and key head whether the last calls at this level paid: after two calls in a row in which
// more than 70 % of the visible blocks were kept, 30 calls are dense (bound 0) without a look at the sketch; then one call
// tries again. So the same calls on equal caches give the same bits, but a call depends on those before it; forks and
// Reorder() take what is remembered with them, a loaded cache begins anew. Calls in which a row sees three blocks at most are
// dense and not remembered. At the level kSketch nothing is remembered or looked up.
//
// Reproducibility. Bits of o and lse are those of attention::Attend() with the pattern row_blocks of S. S and bound depend
// on the row's query, its group's and the keys alone, and on the SIMD target.
//
// Cost. The sketch is read once per 4 rows of a key head, D + 8 bytes per key, then the rows of S.
//
// Throws InvalidArgument as attention::Attend() does, for an epsilon outside [0, 1), and for a cache without a sketch or with
// rotary. On throw nothing has been written.
HEED_API void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                     const Outputs& out);

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_H_
