// heed.simple_gla, heed.simple_gla_backward and heed.simple_gla_step.
#include "heed/ops/gated/simple_gla/simple_gla.h"

#include "docstrings/simple_gla.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::simple_gla {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "simple_gla",
                      .inputs = {"q", "k", "v", "log_decay"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::simple_gla
