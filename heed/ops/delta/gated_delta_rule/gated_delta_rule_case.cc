// The gated delta rule in the harness.
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::gated_delta_rule {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "gated_delta_rule", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::gated_delta_rule
