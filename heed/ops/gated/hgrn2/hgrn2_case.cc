// HGRN2 in the harness.
#include "heed/ops/gated/hgrn2/hgrn2.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::hgrn2 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "hgrn2",
      {.decay = recurrent::DecayShape::kKey,
       .complement_keys = true,
       .value_name = "i"},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &Math,
      ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  return recurrent::GatedEntry<&Mechanism>("B Tq (Hkv D + Hq D + 2 Hq Dv) size");
}

}  // namespace heed::hgrn2
