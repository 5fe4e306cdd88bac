// The reference of RWKV-6, in double.
//
//   o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t      S: [K, V]
//   S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T
//
// with scale = 1 by default; log_decay is [B, T, HV, K], u [HV, K].
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"

namespace heed::rwkv6 {

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = options.scale.value_or(1);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.bonus = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::rwkv6
