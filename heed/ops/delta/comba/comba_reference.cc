// The reference of Comba, in double.
//
//   S~_t = exp(log_decay_t) S_{t-1}      S: [K, V]
//   S_t = S~_t + beta_t k_t (v_t - S~_t^T p_t)^T
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay and beta are [B, T, HV], p is like k.
#include "heed/ops/delta/comba/comba_internal.h"

namespace heed::comba {

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerToken(in.log_decay);
  math.beta = true;
  math.read_key = &recurrent::ReferenceInputs::p;
  math.d_read_key = &recurrent::ReferenceGradients::p;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::comba
