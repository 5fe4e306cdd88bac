// Comba in the harness.
#include "heed/ops/delta/comba/comba_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::comba {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "comba", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::comba
