// heed.gdn2, heed.gdn2_backward and heed.gdn2_step.
#include "heed/ops/delta/gdn2/gdn2.h"

#include "docstrings/gdn2.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::gdn2 {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "gdn2",
                      .inputs = {"q", "k", "v", "log_decay", "erase", "write"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::gdn2
