// heed.rwkv6, heed.rwkv6_backward and heed.rwkv6_step.
#include "heed/ops/gated/rwkv6/rwkv6.h"

#include "docstrings/rwkv6.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::rwkv6 {

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "rwkv6",
                      .inputs = {"r", "k", "v", "log_decay", "u"},
                      .bind = [](const recurrent::Settings&) -> recurrent::Functions {
                        return {&Forward, &Backward, &Step, &Explain};
                      },
                      .docs = doc::kDocs});
}

}  // namespace heed::rwkv6
