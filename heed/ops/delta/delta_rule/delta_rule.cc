// The delta rule on the recurrence engine.
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"

namespace heed::delta_rule {

recurrent::Definition DefinitionOf(const Options&) {
  return {.root_scale = true, .delta = recurrence::Delta::kAfterDecay, .beta = true};
}

HEED_DEFINE_RECURRENT(recurrent, delta_rule)

}  // namespace heed::delta_rule
