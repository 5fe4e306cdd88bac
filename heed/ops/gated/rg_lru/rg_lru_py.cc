// Bindings of heed.rg_lru, heed.rg_lru_backward and heed.rg_lru_step.
#include "docstrings/rg_lru.h"
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "python/mechanism/describe.h"

namespace heed::rg_lru {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.c = settings.Get<double>("c");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(m, {.name = "rg_lru", .settings = {{"c", Options().c}}, .docs = doc::kDocs},
                                  DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::rg_lru
