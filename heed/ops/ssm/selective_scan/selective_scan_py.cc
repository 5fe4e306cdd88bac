// heed.selective_scan, heed.selective_scan_backward and heed.selective_scan_step.
#include "docstrings/selective_scan.h"
#include "heed/ops/mechanism/scanning_py.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

namespace heed::selective_scan {

void Bind(nanobind::module_& m) {
  scanning::Bind(m, {.name = "selective_scan",
                     .definition = DefinitionOf({}),
                     .num_positional = 7,
                     .settings = {{"delta_softplus", false}},
                     .bind = [](const scanning::Settings& settings) {
                       Options own;
                       own.delta_softplus = std::get<bool>(settings.at("delta_softplus"));
                       return scanning::FunctionsOf<Options>(
                           own, {&Forward, &Backward, &Step, &Explain});
                     },
                     .docs = doc::kDocs});
}

}  // namespace heed::selective_scan
