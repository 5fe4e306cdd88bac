// Bindings of heed.h3, heed.h3_backward and heed.h3_step.
#include <string>
#include "docstrings/h3.h"
#include "python/mechanism/describe.h"
#include "heed/ops/ssm/h3/h3_internal.h"

namespace heed::h3 {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.method = static_cast<Method>(settings.Choice("method"));
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(m,
                                  {.name = "h3",
                                   .settings = {{"method", std::string("auto"), {"auto", "recurrent", "convolution"}}},
                                   .docs = doc::kDocs},
                                  DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::h3
