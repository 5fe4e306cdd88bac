// Bindings of heed.selective_scan, heed.selective_scan_backward and heed.selective_scan_step.
#include "docstrings/selective_scan.h"
#include "python/mechanism/describe.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

namespace heed::selective_scan {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.delta_softplus = settings.Get<bool>("delta_softplus");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(
      m, {.name = "selective_scan", .settings = {{"delta_softplus", false}}, .docs = doc::kDocs}, DefinitionOf({}),
      HEED_FUNCTIONS, &Own);
}

}  // namespace heed::selective_scan
