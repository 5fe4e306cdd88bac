// heed.lightning, heed.lightning_backward and heed.lightning_step.
#include "heed/ops/gated/lightning/lightning.h"

#include "docstrings/lightning.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::lightning {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "lightning",
                      .inputs = {"q", "k", "v", "log_decay"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::lightning
