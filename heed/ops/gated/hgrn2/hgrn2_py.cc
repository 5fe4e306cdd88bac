// Bindings of heed.hgrn2, heed.hgrn2_backward and heed.hgrn2_step.
#include "docstrings/hgrn2.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::hgrn2 {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "hgrn2", .inputs = "q log_decay i", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::hgrn2
