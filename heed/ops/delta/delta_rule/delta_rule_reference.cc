// The reference of the delta rule, in double.
//
//   S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; beta is [B, T, HV].
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"

namespace heed::delta_rule {

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  math.beta = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::delta_rule
