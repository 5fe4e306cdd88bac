// The reference of RWKV-7, in double.
//
//   S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T r_t
//
// with scale = 1 by default; log_decay is [B, T, HV, K], a and b are like k.
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"

namespace heed::rwkv7 {

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = options.scale.value_or(1);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.read_key = &recurrent::ReferenceInputs::a;
  math.d_read_key = &recurrent::ReferenceGradients::a;
  math.reads_before_decay = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::rwkv7
