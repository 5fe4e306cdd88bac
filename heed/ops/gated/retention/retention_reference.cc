// The reference of Retention, in double.
//
//   S_t = exp(log_decay) S_{t-1} + k_t v_t^T      S: [K, V]
//   o_t = scale S_t^T q_t
//
// with scale = K^-1/2 by default; log_decay is [HV], log(1 - 2^(-5 - head)) where it is absent.
#include <cmath>

#include "heed/ops/gated/retention/retention_internal.h"

namespace heed::retention {

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math;
  math.scale = recurrent::RootScale(in, options);
  if (in.log_decay.present()) {
    math.log_decay = recurrent::PerHead(in.log_decay);
    return math;
  }
  math.log_decay = [](int64_t, int64_t, int64_t head, int64_t) {
    return std::log(1 - std::pow(2.0, static_cast<double>(-5 - head)));
  };
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::RunReference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::RunBackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::retention
