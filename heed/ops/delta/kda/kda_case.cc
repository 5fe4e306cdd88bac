// Kimi delta attention in the harness.
#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::kda {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options, recurrent::DeltaMath>(
      "kda", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::kda
