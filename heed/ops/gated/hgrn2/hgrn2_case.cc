// HGRN2 in the harness.
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::hgrn2 {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "hgrn2", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::GatedEntry(mechanism, "B Tq (Hkv D + Hq D + 2 Hq Dv) size");
}

}  // namespace heed::hgrn2
