// The gated delta rule in the harness.
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed::gated_delta_rule {
namespace {

const recurrent::Mechanism& Mechanism() {
  static const recurrent::Mechanism mechanism = {
      "gated_delta_rule", kDefinition, &Forward, &Backward, &Reference, &BackwardReference, &Step, {}, ""};
  return mechanism;
}

}  // namespace

OpEntry Entry() { return recurrent::DeltaEntry<&Mechanism>(); }

}  // namespace heed::gated_delta_rule
