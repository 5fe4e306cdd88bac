// RWKV-6 in the harness.
#include "heed/ops/gated/rwkv6/rwkv6.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::rwkv6 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "rwkv6",
      {.decay = recurrent::DecayShape::kKey, .bonus = true, .query_name = "r"},
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
  return recurrent::GatedEntry<&Mechanism>("B Tq (2 Hkv D + Hq D + 2 Hq Dv) size");
}

}  // namespace heed::rwkv6
