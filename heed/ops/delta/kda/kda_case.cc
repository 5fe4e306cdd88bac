// Kimi delta attention in the harness.
#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::kda {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "kda", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() { return recurrent::DeltaEntry<&Mechanism>(); }

}  // namespace heed::kda
