// heed.kda, heed.kda_backward and heed.kda_step.
#include "heed/ops/delta/kda/kda.h"

#include "docstrings/kda.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::kda {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "kda",
                      .inputs = {"q", "k", "v", "log_decay", "beta"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::kda
