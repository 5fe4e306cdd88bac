// Bindings of heed.rwkv6, heed.rwkv6_backward and heed.rwkv6_step.
#include "docstrings/rwkv6.h"
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::rwkv6 {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "rwkv6", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::rwkv6
