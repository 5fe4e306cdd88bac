// The delta rule in the harness.
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::delta_rule {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "delta_rule", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::delta_rule
