// Lightning attention in the harness.
#include "heed/ops/gated/lightning/lightning.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::lightning {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "lightning",
      {.decay = recurrent::DecayShape::kHead},
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
  return recurrent::GatedEntry<&Mechanism>("B Tq (2 Hkv D + 2 Hq Dv) size");
}

}  // namespace heed::lightning
