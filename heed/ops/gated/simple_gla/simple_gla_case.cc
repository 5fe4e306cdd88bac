// Simple GLA in the harness.
#include "heed/ops/gated/simple_gla/simple_gla_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::simple_gla {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "simple_gla", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  return recurrent::GatedEntry(mechanism, "B Tq (2 Hkv D + 2 Hq Dv + Hq) size");
}

}  // namespace heed::simple_gla
