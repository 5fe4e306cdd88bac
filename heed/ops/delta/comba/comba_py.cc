// Bindings of heed.comba, heed.comba_backward and heed.comba_step.
#include "docstrings/comba.h"
#include "heed/ops/delta/comba/comba_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::comba {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "comba", .inputs = "q k v p log_decay beta", .docs = doc::kDocs},
                           DefinitionOf({}), {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::comba
