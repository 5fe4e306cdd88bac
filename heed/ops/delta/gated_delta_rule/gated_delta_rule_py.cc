// Bindings of heed.gated_delta_rule, heed.gated_delta_rule_backward and heed.gated_delta_rule_step.
#include "docstrings/gated_delta_rule.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::gated_delta_rule {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "gated_delta_rule", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::gated_delta_rule
