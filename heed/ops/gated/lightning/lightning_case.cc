// Lightning attention in the harness.
#include "heed/ops/gated/lightning/lightning_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::lightning {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "lightning", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::GatedEntry(mechanism, "B Tq (2 Hkv D + 2 Hq Dv) size");
}

}  // namespace heed::lightning
