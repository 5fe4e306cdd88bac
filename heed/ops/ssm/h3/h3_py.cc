// heed.h3, heed.h3_backward and heed.h3_step.
#include <string>
#include <vector>

#include "docstrings/h3.h"
#include "heed/ops/mechanism/scanning_py.h"
#include "heed/ops/ssm/h3/h3.h"
#include "heed/ops/ssm/h3/h3_internal.h"

namespace heed::h3 {

void Bind(nanobind::module_& m) {
  scanning::Bind(
      m, {.name = "h3",
          .definition = DefinitionOf({}),
          .num_positional = 9,
          .settings = {{"method", scanning::Word{"auto", {"auto", "recurrent", "convolution"}}}},
          .bind = [](const scanning::Settings& settings) {
            const std::string& method = std::get<scanning::Word>(settings.at("method")).value;
            Options own;
            own.method = method == "auto"        ? Method::kAuto
                         : method == "recurrent" ? Method::kRecurrent
                                                 : Method::kConvolution;
            return scanning::FunctionsOf<Options>(own, {&Forward, &Backward, &Step, &Explain});
          },
          .docs = doc::kDocs});
}

}  // namespace heed::h3
