// Kimi delta attention in the harness.
#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::kda {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "kda", DefinitionOf({}), {},
      {&Forward, &Backward, &Reference, &BackwardReference, &Step});
  return recurrent::DeltaEntry(mechanism);
}

}  // namespace heed::kda
