// Bindings of heed.gla, heed.gla_backward and heed.gla_step.
#include "docstrings/gla.h"
#include "heed/ops/gated/gla/gla_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::gla {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "gla", .inputs = "q k v log_decay * log_decay_v", .docs = doc::kDocs},
                           DefinitionOf({}), {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::gla
