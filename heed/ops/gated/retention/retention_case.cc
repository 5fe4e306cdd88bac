// Retention in the harness.
#include <cmath>

#include "heed/ops/gated/retention/retention_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::retention {

OpEntry Entry() {
  static const recurrent::Mechanism mechanism = recurrent::Bound<Options>("retention", DefinitionOf({}), {},
                                                                          {.forward = &Forward,
                                                                           .backward = &Backward,
                                                                           .reference = &Reference,
                                                                           .backward_reference = &BackwardReference,
                                                                           .step = &Step,
                                                                           .explain = &Explain,
                                                                           .backward_workspace = &BackwardWorkspace},
                                                                          &Math);
  OpEntry entry = recurrent::GatedEntry(mechanism, "B Tq (2 Hkv D + 2 Hq Dv) size");
  entry.inputs.back().optional = true;  // decays may be absent
  entry.weights = [](int64_t head, int64_t channels) {
    return ImpliedWeights{.form = "identity",
                          .scale = 1 / std::sqrt(static_cast<double>(channels)),
                          .log_decay = LogDecays(head + 1).back()};
  };
  return entry;
}

}  // namespace heed::retention
