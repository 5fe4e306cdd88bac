// Bindings of heed.performer, heed.performer_backward and heed.performer_step.
#include <string>
#include "docstrings/performer.h"
#include "heed/ops/linear/performer/performer_internal.h"
#include "python/mechanism/describe.h"

namespace heed::performer {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.causal = settings.Get<bool>("causal");
  own.kernel = static_cast<Kernel>(settings.Choice("kernel"));
  own.eps = settings.Get<double>("eps");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(
      m,
      {.name = "performer",
       .settings = {{"causal", false}, {"kernel", std::string("softmax"), {"softmax", "relu"}}, {"eps", 1e-4}},
       .docs = doc::kDocs},
      DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::performer
