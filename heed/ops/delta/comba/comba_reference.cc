// Comba as it is defined, in double.
#include "heed/ops/delta/comba/comba_internal.h"
#include "heed/ops/mechanism/delta_reference_internal.h"

namespace heed::comba {

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::DeltaReference(DefinitionOf(options), in, options, out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::DeltaBackwardReference(DefinitionOf(options), in, options, out);
}

}  // namespace heed::comba
