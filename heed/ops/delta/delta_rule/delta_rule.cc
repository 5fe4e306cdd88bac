// The delta rule on the recurrence engine.
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::delta_rule {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, delta_rule)

}  // namespace heed::delta_rule
