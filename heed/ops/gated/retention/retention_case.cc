// Retention in the harness.
#include <cmath>

#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/gated/retention/retention_internal.h"

namespace heed::retention {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism =
      recurrent::Bound<Structs, Options>("retention", DefinitionOf({}), {}, HEED_FUNCTIONS, &Math);
  OpEntry entry = recurrent::EntryOf(mechanism, "gated");
  entry.weights = [](int64_t head, int64_t channels) {
    return ImpliedWeights{.form = "identity",
                          .scale = 1 / std::sqrt(static_cast<double>(channels)),
                          .log_decay = LogDecays(head + 1).back()};
  };
  return entry;
}

}  // namespace heed::retention
