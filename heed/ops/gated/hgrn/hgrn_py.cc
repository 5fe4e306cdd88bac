// heed.hgrn, heed.hgrn_backward and heed.hgrn_step.
#include "docstrings/hgrn.h"
#include "heed/ops/gated/hgrn/hgrn.h"
#include "heed/ops/gated/hgrn/hgrn_internal.h"
#include "heed/ops/mechanism/scanning_py.h"

namespace heed::hgrn {

void Bind(nanobind::module_& m) {
  scanning::Bind(m, {.name = "hgrn",
                     .definition = DefinitionOf({}),
                     .num_positional = 2,
                     .bind = [](const scanning::Settings&) {
                       return scanning::FunctionsOf<Options>(
                           {}, {&Forward, &Backward, &Step, &Explain});
                     },
                     .docs = doc::kDocs});
}

}  // namespace heed::hgrn
