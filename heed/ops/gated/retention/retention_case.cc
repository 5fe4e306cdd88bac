// Retention in the harness.
#include <cmath>

#include "heed/ops/gated/retention/retention.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::retention {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "retention",
      {.decay = recurrent::DecayShape::kHead},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &recurrent::OrdinaryMath,
      "",
      &Explain};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = recurrent::GatedEntry<&Mechanism>("B Tq (2 Hkv D + 2 Hq Dv) size");
  entry.inputs.back().optional = true;  // decays may be left out
  entry.weights = [](int64_t head, int64_t channels) {
    return ImpliedWeights{.form = "identity",
                          .scale = 1 / std::sqrt(static_cast<double>(channels)),
                          .log_decay = LogDecays(head + 1).back()};
  };
  return entry;
}

}  // namespace heed::retention
