// RWKV-7 in the harness.
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::rwkv7 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "rwkv7", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() { return recurrent::DeltaEntry<&Mechanism>(); }

}  // namespace heed::rwkv7
