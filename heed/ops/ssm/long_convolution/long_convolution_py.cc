// Bindings of heed.long_convolution and heed.long_convolution_backward.
#include "docstrings/long_convolution.h"
#include "python/mechanism/describe.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(m, {.name = "long_convolution", .docs = doc::kDocs}, DefinitionOf({}),
                                  HEED_FUNCTIONS_WITHOUT_STEP);
}

}  // namespace heed::long_convolution
