// The gated delta rule with two gates in the harness.
#include "heed/ops/delta/gdn2/gdn2_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::gdn2 {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "gdn2", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::gdn2
