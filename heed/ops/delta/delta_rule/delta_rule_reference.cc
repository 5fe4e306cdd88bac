// The delta rule as it is defined, in double.
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "heed/ops/mechanism/delta_reference_internal.h"

namespace heed::delta_rule {

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::DeltaReference(DefinitionOf(options), in, options, out);
}

void BackwardReference(const BackwardInputs& in, const Options& options,
                       const Gradients& out) {
  recurrent::DeltaBackwardReference(DefinitionOf(options), in, options, out);
}

}  // namespace heed::delta_rule
