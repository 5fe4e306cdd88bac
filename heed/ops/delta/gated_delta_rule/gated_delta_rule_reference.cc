// The reference of the gated delta rule, in double.
//
//   S~_t = exp(log_decay_t) S_{t-1}      S: [K, V]
//   S_t = S~_t + beta_t k_t (v_t - S~_t^T k_t)^T
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay and beta are [B, T, HV].
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"

namespace heed::gated_delta_rule {

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerToken(in.log_decay);
  math.beta = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::gated_delta_rule
