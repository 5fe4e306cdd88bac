// Bindings of heed.rwkv7, heed.rwkv7_backward and heed.rwkv7_step.
#include "docstrings/rwkv7.h"
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::rwkv7 {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "rwkv7", .inputs = "r log_decay k v a b", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::rwkv7
