// Bindings of heed.delta_rule, heed.delta_rule_backward and heed.delta_rule_step.
#include "docstrings/delta_rule.h"
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::delta_rule {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "delta_rule", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::delta_rule
