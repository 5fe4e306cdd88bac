// heed.retention, heed.retention_backward and heed.retention_step.
#include "heed/ops/gated/retention/retention.h"

#include "docstrings/retention.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::retention {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "retention",
                      .inputs = {"q", "k", "v", {"log_decay", recurrent::Input::kDecay, true}},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::retention
