// GLA in the harness.
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/gated/gla/gla_internal.h"

namespace heed::gla {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism =
      recurrent::Bound<Structs, Options>("gla", DefinitionOf({}), {}, HEED_FUNCTIONS, &Math);
  OpEntry entry = recurrent::GatedEntry(mechanism, "B Tq (3 Hq D + 2 Hq Dv) size");
  entry.variants.insert(entry.variants.end(), {"columns", "columns+strong", "columns+vanishing"});
  return entry;
}

}  // namespace heed::gla
