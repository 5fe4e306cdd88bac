// Retention as it is defined, in double.
#include <cmath>

#include "heed/ops/gated/retention/retention.h"
#include "heed/ops/mechanism/recurrent_reference_internal.h"

namespace heed::retention {
namespace {

recurrent::ReferenceMath Math(const Inputs& in, const Options& options) {
  recurrent::ReferenceMath math = recurrent::OrdinaryMath(in, options);
  if (in.log_decay.present()) return math;
  math.log_decay = [](int64_t, int64_t, int64_t head, int64_t) {
    return std::log(1 - std::pow(2.0, static_cast<double>(-5 - head)));
  };
  return math;
}

}  // namespace

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Reference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::BackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::retention
