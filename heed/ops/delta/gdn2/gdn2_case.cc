// The gated delta rule of two gates in the harness.
#include "heed/ops/delta/gdn2/gdn2_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::gdn2 {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "gdn2", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() { return recurrent::DeltaEntry<&Mechanism>(); }

}  // namespace heed::gdn2
