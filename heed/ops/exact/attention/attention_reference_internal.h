// Internals of the reference for each row, beside its result: the harness derives a kernel's tolerance from them.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <span>

#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// One (query, key) pair that is kept and whose logit is not -inf.
struct ReferencePair {
  int64_t key;             // index in its sequence
  double logit;            // s_ij
  double magnitude;        // sum_d |scale q_id k_jd| + |alibi_ij| + |F_ij| + |bias_ij|
  double partial_norm;     // root of the sum of squares of the products
                           // scale q_id k_jd and of their partial sums over d
  double slope;            // derivative of the soft cap: d logit / d (scale <q_i, k_j>)
  double distance;         // |p_i - j|
  int64_t keys_before;     // p_i - j
  double forgotten;        // F_ij
  const double *k, *v;     // [D], [Dv]
  double probability = 0;  // P
  double weight = 0;       // coefficient of v in o: w P Z / (1 - dropout)
};

// A row inside its sequence. `index` is its place in the outputs.
struct ReferenceRow {
  int64_t sequence, head, query;
  int64_t output_row;  // axis 1 of o; for packed calls over all sequences
  int64_t first_key;   // first key of the sequence on axis 1 of k and v
  int64_t stands_at;   // the last valid key at or before p_i, or below 0
  double lse;
  double w, sink_probability;  // sigmoid(lse - sink), and one minus it
  const double* q;             // [D]
  std::span<const ReferencePair> pairs;
};

// Reference(), with a call of `f` for each row. The arguments have been validated.
void ReferenceRows(const Inputs& in, const Options& options, const Outputs& out,
                   const std::function<void(const ReferenceRow&)>& f);

// Allowed error of the contribution of a row's pairs to a gradient: a fraction of the contribution with all terms taken
// by magnitude, and a fraction of each element of o.
struct Roundoff {
  std::function<double(const ReferenceRow&)> relative;
  double of_o = 0;
};

// BackwardReference(), and for each gradient the allowed error summed over its pairs in `magnitudes`. The arguments
// have been validated.
void ReferenceGradients(const BackwardInputs& in, const Options& options, const Gradients& out,
                        const Gradients& magnitudes, const Roundoff& roundoff);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_REFERENCE_INTERNAL_H_
