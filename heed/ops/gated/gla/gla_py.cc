// heed.gla, heed.gla_backward and heed.gla_step.
#include "heed/ops/gated/gla/gla.h"

#include "docstrings/gla.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::gla {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "gla",
                      .inputs = {"q", "k", "v", "log_decay",
                                 {"log_decay_v", recurrent::Input::kTensor, true}},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::gla
