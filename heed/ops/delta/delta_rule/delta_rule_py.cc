// heed.delta_rule, heed.delta_rule_backward and heed.delta_rule_step.
#include "heed/ops/delta/delta_rule/delta_rule.h"

#include "docstrings/delta_rule.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::delta_rule {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "delta_rule",
                      .inputs = {"q", "k", "v", "beta"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::delta_rule
