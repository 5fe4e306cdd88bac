// Comba in the harness.
#include "heed/ops/delta/comba/comba_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::comba {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "comba", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() { return recurrent::DeltaEntry<&Mechanism>(); }

}  // namespace heed::comba
