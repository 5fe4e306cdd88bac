// What gated_delta_rule says of itself.
#ifndef HEED_OPS_DELTA_GATED_DELTA_RULE_GATED_DELTA_RULE_INTERNAL_H_
#define HEED_OPS_DELTA_GATED_DELTA_RULE_GATED_DELTA_RULE_INTERNAL_H_

#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::gated_delta_rule {

recurrent::Definition DefinitionOf(const Options& options);

}  // namespace heed::gated_delta_rule

#endif  // HEED_OPS_DELTA_GATED_DELTA_RULE_GATED_DELTA_RULE_INTERNAL_H_
