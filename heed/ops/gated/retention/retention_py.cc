// Bindings of heed.retention, heed.retention_backward and heed.retention_step.
#include "docstrings/retention.h"
#include "heed/ops/gated/retention/retention_internal.h"
#include "python/mechanism/recurrent.h"

namespace heed::retention {

void Bind(nanobind::module_& m) {
  recurrent::Bind<Options>(m, {.name = "retention", .inputs = "q k v * log_decay", .docs = doc::kDocs},
                           DefinitionOf({}), {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::retention
