// The reference of Lightning attention, in double.
//
//   S_t = exp(log_decay) S_{t-1} + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay is [HV].
#include "heed/ops/gated/lightning/lightning_internal.h"

namespace heed::lightning {

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerHead(in.log_decay);
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::lightning
