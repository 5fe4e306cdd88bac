// Bindings of heed.long_convolution and heed.long_convolution_backward.
#include "docstrings/long_convolution.h"
#include "python/mechanism/scanning.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {

void Bind(nanobind::module_& m) {
  scanning::Bind<Options>(m, {.name = "long_convolution", .docs = doc::kDocs}, DefinitionOf({}),
                          {&Forward, &Backward, nullptr, &Explain});
}

}  // namespace heed::long_convolution
