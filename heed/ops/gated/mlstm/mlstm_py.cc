// Bindings of heed.mlstm, heed.mlstm_backward and heed.mlstm_step.
#include "docstrings/mlstm.h"
#include "heed/ops/gated/mlstm/mlstm_internal.h"
#include "python/mechanism/describe.h"

namespace heed::mlstm {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.eps = settings.Get<double>("eps");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(m, {.name = "mlstm", .settings = {{"eps", 1e-6}}, .docs = doc::kDocs},
                                  DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::mlstm
