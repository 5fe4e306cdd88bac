// Bindings of heed.lightning, heed.lightning_backward and heed.lightning_step.
#include "docstrings/lightning.h"
#include "heed/ops/gated/lightning/lightning_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::lightning {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "lightning", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::lightning
