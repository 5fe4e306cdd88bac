// The engine definition of delta_rule, and the equations of its reference.
#ifndef HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
#define HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_

#include "heed/ops/delta/delta_rule/delta_rule.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::delta_rule {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::delta_rule

#endif  // HEED_OPS_DELTA_DELTA_RULE_DELTA_RULE_INTERNAL_H_
