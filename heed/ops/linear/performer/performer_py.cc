// heed.performer, heed.performer_backward and heed.performer_step.
#include "heed/ops/linear/performer/performer.h"

#include <string>

#include "docstrings/performer.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::performer {
namespace {

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  Options own;
  own.causal = std::get<bool>(settings.at("causal"));
  own.kernel = std::get<std::string>(settings.at("kernel")) == "relu" ? Kernel::kRelu
                                                                      : Kernel::kSoftmax;
  own.eps = std::get<double>(settings.at("eps"));
  recurrent::Functions functions =
      recurrent::FunctionsOf<Options>(own, {&Forward, &Backward, &Step, &Explain});
  functions.normalizer = true;
  return functions;
}

}  // namespace

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "performer",
                      .inputs = {"q", "k", "v", "projection"},
                      .settings = {{"causal", false, {}},
                                   {"kernel", std::string("softmax"), {"softmax", "relu"}},
                                   {"eps", 1e-4, {}}},
                      .bind = &BindSettings,
                      .docs = doc::kDocs});
}

}  // namespace heed::performer
