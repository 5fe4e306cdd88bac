// What delta_rule says of itself.
#ifndef HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_

#include "heed/ops/delta/delta_rule/delta_rule.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::delta_rule {

inline constexpr recurrent::Definition kDefinition = {.root_scale = true,
                                               .delta = recurrence::Delta::kAfterDecay,
                                               .beta = true};
inline recurrent::Definition DefinitionOf(const Options&) { return kDefinition; }

}  // namespace heed::delta_rule

#endif  // HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
