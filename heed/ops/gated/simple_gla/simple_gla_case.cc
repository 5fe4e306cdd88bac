// Simple GLA in the harness.
#include "heed/ops/gated/simple_gla/simple_gla.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::simple_gla {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "simple_gla",
      {.decay = recurrent::DecayShape::kToken},
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
  return recurrent::GatedEntry<&Mechanism>("B Tq (2 Hkv D + 2 Hq Dv + Hq) size");
}

}  // namespace heed::simple_gla
