// Lightning attention as it is defined, in double.
#include "heed/ops/gated/lightning/lightning.h"
#include "heed/ops/mechanism/recurrent_reference_internal.h"

namespace heed::lightning {

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Reference(in, options, recurrent::OrdinaryMath(in, options), out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::BackwardReference(in, options, recurrent::OrdinaryMath(in, options), out);
}

}  // namespace heed::lightning
