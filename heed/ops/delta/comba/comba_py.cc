// heed.comba, heed.comba_backward and heed.comba_step.
#include "heed/ops/delta/comba/comba.h"

#include "docstrings/comba.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::comba {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "comba",
                      .inputs = {"q", "k", "v", "p", "log_decay", "beta"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::comba
