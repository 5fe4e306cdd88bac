// heed.gated_delta_rule, heed.gated_delta_rule_backward and heed.gated_delta_rule_step.
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"

#include "docstrings/gated_delta_rule.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::gated_delta_rule {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "gated_delta_rule",
                      .inputs = {"q", "k", "v", "log_decay", "beta"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::gated_delta_rule
