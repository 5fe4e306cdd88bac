// Bindings of heed.based, heed.based_backward and heed.based_step.
#include "docstrings/based.h"
#include "heed/ops/linear/based/based_internal.h"
#include "python/mechanism/describe.h"

namespace heed::based {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.normalize = settings.Get<bool>("normalize");
  own.eps = settings.Get<double>("eps");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(
      m, {.name = "based", .settings = {{"normalize", true}, {"eps", 1e-12}}, .docs = doc::kDocs}, DefinitionOf({}),
      HEED_FUNCTIONS, &Own);
}

}  // namespace heed::based
