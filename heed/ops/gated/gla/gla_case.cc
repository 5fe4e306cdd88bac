// GLA in the harness.
#include "heed/ops/gated/gla/gla.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::gla {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "gla",
      {.decay = recurrent::DecayShape::kKey, .value_decay = true},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &recurrent::OrdinaryMath,
      ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = recurrent::GatedEntry<&Mechanism>("B Tq (3 Hq D + 2 Hq Dv) size");
  entry.variants.insert(entry.variants.end(),
                        {"columns", "columns+strong", "columns+vanishing"});
  return entry;
}

}  // namespace heed::gla
