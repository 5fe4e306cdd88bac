// heed.rwkv5, heed.rwkv5_backward and heed.rwkv5_step.
#include "heed/ops/gated/rwkv5/rwkv5.h"

#include "docstrings/rwkv5.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::rwkv5 {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "rwkv5",
                      .inputs = {"r", "k", "v", "log_decay", "u"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::rwkv5
