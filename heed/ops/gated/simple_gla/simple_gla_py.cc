// Bindings of heed.simple_gla, heed.simple_gla_backward and heed.simple_gla_step.
#include "docstrings/simple_gla.h"
#include "heed/ops/gated/simple_gla/simple_gla_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::simple_gla {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "simple_gla", .docs = doc::kDocs}, DefinitionOf({}),
                           {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::simple_gla
