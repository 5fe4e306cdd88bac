// The reference of DeltaProduct, in double.
//
//   S_t^0 = exp(log_decay_t) S_{t-1}      S: [K, V]
//   S_t^j = S_t^{j-1} + beta_tj k_tj (v_tj - (S_t^{j-1})^T k_tj)^T,   j = 1 .. n
//   S_t = S_t^n,  o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay is [B, T, HV] or absent, k [B, T, n, H, K], v [B, T, n, HV, V],
// beta [B, T, n, HV].
#include "heed/ops/delta/delta_product/delta_product_internal.h"

namespace heed::delta_product {

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  if (in.log_decay.present()) math.log_decay = recurrent::PerToken(in.log_decay);
  math.beta = true;
  math.several_writes = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::delta_product
