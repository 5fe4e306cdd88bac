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
  int64_t key;             // in its sequence
  double logit;            // s_ij
  double magnitude;        // sum_d |scale q_id k_jd| + |alibi_ij| + |F_ij| + |bias_ij|
  double partial_norm;     // root of the sum of squares of the products
                           // scale q_id k_jd and of their partial sums over d
  double slope;            // of the soft cap there: d logit / d (scale <q_i, k_j>)
  double distance;         // |p_i - j|
  double forgotten;        // F_ij
  const double *k, *v;     // [D], [Dv]
  double probability = 0;  // P
  double weight = 0;       // of v in o: w P Z / (1 - dropout)
};

// One row that is inside its sequence. `index` is its place in the outputs.
struct ReferenceRow {
  int64_t sequence, head, query;
  int64_t output_row;  // axis 1 of o; packed: of all sequences together
  int64_t first_key;   // of the sequence: axis 1 of k and v
  int64_t stands_at;   // the last valid key at or before p_i, or below 0
  double lse;
  double w, sink_probability;  // sigmoid(lse - sink) and what it lacks of 1
  const double* q;             // [D]
  std::span<const ReferencePair> pairs;
};

// Reference(), and `visit` for each row. The arguments have been validated.
void ReferenceRows(const Inputs& in, const Options& options, const Outputs& out,
                   const std::function<void(const ReferenceRow&)>& visit);

// What a kernel may miss of what the pairs of a row add to a gradient: a share of that,
// everything in it taken without signs, and a share of each element of o.
struct Roundoff {
  std::function<double(const ReferenceRow&)> relative;
  double of_o = 0;
};

// BackwardReference(), and for each gradient in `magnitudes` the sums of what its
// pairs may miss. The arguments have been validated.
void ReferenceGradients(const BackwardInputs& in, const Options& options, const Gradients& out,
                        const Gradients& magnitudes, const Roundoff& roundoff);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_
