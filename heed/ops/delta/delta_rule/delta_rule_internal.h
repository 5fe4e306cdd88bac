// What delta_rule says of itself.
#ifndef HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_

#include "heed/ops/delta/delta_rule/delta_rule.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::delta_rule {

recurrent::Definition DefinitionOf(const Options& options);

}  // namespace heed::delta_rule

#endif  // HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
