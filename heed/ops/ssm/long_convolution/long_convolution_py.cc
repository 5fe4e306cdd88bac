// heed.long_convolution and heed.long_convolution_backward.
#include "docstrings/long_convolution.h"
#include "heed/ops/mechanism/scanning_py.h"
#include "heed/ops/ssm/long_convolution/long_convolution.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {

void Bind(nanobind::module_& m) {
  scanning::Bind(m, {.name = "long_convolution",
                     .definition = DefinitionOf({}),
                     .num_positional = 3,
                     .bind = [](const scanning::Settings&) {
                       return scanning::FunctionsOf<Options>({},
                                                             {&Forward, &Backward, nullptr, &Explain});
                     },
                     .docs = doc::kDocs});
}

}  // namespace heed::long_convolution
