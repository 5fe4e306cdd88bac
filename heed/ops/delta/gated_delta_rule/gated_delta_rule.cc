// The gated delta rule on the recurrence engine.
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::gated_delta_rule {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, gated_delta_rule)

}  // namespace heed::gated_delta_rule
