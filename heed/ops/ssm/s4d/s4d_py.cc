// heed.s4d, heed.s4d_backward, heed.s4d_step, heed.s4d_kernel and heed.s4d_kernel_backward.
#include "docstrings/s4d.h"
#include "heed/ops/parts/scanning_py.h"
#include "heed/ops/ssm/s4d/s4d.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"

namespace heed::s4d {

void Bind(nanobind::module_& m) {
  scanning::Bind(
      m, {.name = "s4d",
          .definition = DefinitionOf({}),
          .num_positional = 6,
          .settings = {{"method", scanning::Word{"auto", {"auto", "recurrent", "convolution"}}},
                       {"discretization", scanning::Word{"zoh", {"zoh", "bilinear"}}}},
          .bind = [](const scanning::Settings& settings) {
            const auto word = [&](const char* name) -> const std::string& {
              return std::get<scanning::Word>(settings.at(name)).value;
            };
            Options own;
            own.method = word("method") == "auto"        ? Method::kAuto
                         : word("method") == "recurrent" ? Method::kRecurrent
                                                         : Method::kConvolution;
            own.discretization = word("discretization") == "zoh" ? Discretization::kZeroOrderHold
                                                                 : Discretization::kBilinear;
            return scanning::FunctionsOf<Options>(own, {&Forward, &Backward, &Step, &Explain});
          },
          .docs = doc::kDocs});
}

}  // namespace heed::s4d
