// HGRN2 as it is defined, in double.
#include "heed/ops/gated/hgrn2/hgrn2.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"

namespace heed::hgrn2 {

recurrent::ReferenceMath Math(const Inputs& in, const recurrent::Options& options) {
  recurrent::ReferenceMath math = recurrent::OrdinaryMath(in, options);
  math.complement_keys = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Reference(in, options, Math(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::BackwardReference(in, options, Math(in, options), out);
}

}  // namespace heed::hgrn2
