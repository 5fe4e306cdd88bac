// GLA in the harness.
#include "heed/ops/gated/gla/gla_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::gla {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>(
      "gla", DefinitionOf({}), {}, {&Forward, &Backward, &Reference, &BackwardReference, &Step}, &Math);
  OpEntry entry = recurrent::GatedEntry(mechanism, "B Tq (3 Hq D + 2 Hq Dv) size");
  entry.variants.insert(entry.variants.end(), {"columns", "columns+strong", "columns+vanishing"});
  return entry;
}

}  // namespace heed::gla
