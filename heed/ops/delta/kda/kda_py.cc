// Bindings of heed.kda, heed.kda_backward and heed.kda_step.
#include "docstrings/kda.h"
#include "heed/ops/delta/kda/kda_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::kda {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "kda", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::kda
