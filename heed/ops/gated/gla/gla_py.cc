// Bindings of heed.gla, heed.gla_backward and heed.gla_step.
#include "docstrings/gla.h"
#include "heed/ops/gated/gla/gla_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::gla {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Structs, Options>(m, {.name = "gla", .docs = doc::kDocs}, DefinitionOf({}), HEED_FUNCTIONS);
}

}  // namespace heed::gla
