// The reference of GLA, in double.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} diag(exp(log_decay_v_t)) + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay is [B, T, HV, K], log_decay_v [B, T, HV, V] or absent.
#include "heed/ops/gated/gla/gla_internal.h"

namespace heed::gla {

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.log_decay_v = in.log_decay_v;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Reference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::BackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::gla
