// Bindings of heed.rwkv5, heed.rwkv5_backward and heed.rwkv5_step.
#include "docstrings/rwkv5.h"
#include "heed/ops/gated/rwkv5/rwkv5_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::rwkv5 {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "rwkv5", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::rwkv5
