// The reference of HGRN2, in double.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} + (1 - exp(log_decay_t)) i_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay is [B, T, HV, K].
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"

namespace heed::hgrn2 {

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.complement_keys = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::hgrn2
