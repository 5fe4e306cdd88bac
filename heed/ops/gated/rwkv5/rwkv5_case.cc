// RWKV-5 in the harness.
#include "heed/ops/gated/rwkv5/rwkv5.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::rwkv5 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "rwkv5",
      {.decay = recurrent::DecayShape::kHeadKey, .bonus = true, .query_name = "r"},
      &Forward,
      &Backward,
      &Reference,
      &BackwardReference,
      &Step,
      &recurrent::BonusMath,
      ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() {
  return recurrent::GatedEntry<&Mechanism>("B Tq (2 Hkv D + 2 Hq Dv) size");
}

}  // namespace heed::rwkv5
