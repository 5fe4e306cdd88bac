// Bindings of heed.gdn2, heed.gdn2_backward and heed.gdn2_step.
#include "docstrings/gdn2.h"
#include "heed/ops/delta/gdn2/gdn2_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::gdn2 {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "gdn2", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::gdn2
