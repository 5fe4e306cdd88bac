// heed.hgrn2, heed.hgrn2_backward and heed.hgrn2_step.
#include "heed/ops/gated/hgrn2/hgrn2.h"

#include "docstrings/hgrn2.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::hgrn2 {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "hgrn2",
                      .inputs = {"q", "log_decay", {"i", recurrent::Input::kValue}},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::hgrn2
