// Bindings of heed.hgrn, heed.hgrn_backward and heed.hgrn_step.
#include "docstrings/hgrn.h"
#include "heed/ops/gated/hgrn/hgrn_internal.h"
#include "python/mechanism/scanning.h"

namespace heed::hgrn {

void Bind(nanobind::module_& m) {
  scanning::Bind<Options>(m, {.name = "hgrn", .docs = doc::kDocs}, DefinitionOf({}),
                          {&Forward, &Backward, &Step, &Explain});
}

}  // namespace heed::hgrn
