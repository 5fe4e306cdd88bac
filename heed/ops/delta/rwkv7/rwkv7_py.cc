// heed.rwkv7, heed.rwkv7_backward and heed.rwkv7_step.
#include "heed/ops/delta/rwkv7/rwkv7.h"

#include "docstrings/rwkv7.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::rwkv7 {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "rwkv7",
                      .inputs = {"r", "log_decay", "k", "v", "a", "b"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::rwkv7
