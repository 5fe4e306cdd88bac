// The delta rule in the harness.
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::delta_rule {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "delta_rule", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() { return recurrent::DeltaEntry<&Mechanism>(); }

}  // namespace heed::delta_rule
