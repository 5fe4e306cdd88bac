// The reference of the gated delta rule with two gates, in double.
//
//   S~_t = diag(exp(log_decay_t)) S_{t-1}      S: [K, V]
//   S_t = S~_t + k_t (write_t .* v_t - S~_t^T (erase_t .* k_t))^T
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay and erase are [B, T, HV, K], write [B, T, HV, V].
#include "heed/ops/delta/gdn2/gdn2_internal.h"

namespace heed::gdn2 {

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.erase_and_write = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::gdn2
