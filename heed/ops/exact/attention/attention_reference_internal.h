// What the reference can tell about each row beside its result: the harness
// derives the allowed error of a kernel from it.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <span>

#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// One (query, key) pair that is kept and whose logit is not -inf.
struct ReferencePair {
  int64_t key;        // in its sequence
  double logit;       // s_ij
  double magnitude;   // sum_d |scale q_id k_jd| + |alibi_ij| + |bias_ij|
  double partial_norm;  // root of the sum of squares of the products
                        // scale q_id k_jd and of their partial sums over d
  const double* v;    // [Dv]
  double weight = 0;  // of v in o: w P Z / (1 - dropout)
};

// One row that is inside its sequence. `index` is its place in the outputs.
struct ReferenceRow {
  int64_t sequence, head, query;
  int64_t output_row;  // axis 1 of o; packed: of all sequences together
  double lse;
  std::span<const ReferencePair> pairs;
};

// Reference(), and `visit` for each row. The arguments have been validated.
void ReferenceRows(const Inputs& in, const Options& options, const Outputs& out,
                   const std::function<void(const ReferenceRow&)>& visit);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_
