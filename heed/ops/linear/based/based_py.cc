// heed.based, heed.based_backward and heed.based_step.
#include "heed/ops/linear/based/based.h"

#include "docstrings/based.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::based {
namespace {

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  Options own;
  own.normalize = std::get<bool>(settings.at("normalize"));
  own.eps = std::get<double>(settings.at("eps"));
  recurrent::Functions functions =
      recurrent::FunctionsOf<Options>(own, {&Forward, &Backward, &Step, &Explain});
  functions.features = [](int64_t K) {
    return recurrence::FeatureSize(recurrence::Feature::kTaylor, K);
  };
  functions.normalizer = own.normalize;
  return functions;
}

}  // namespace

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "based",
                      .inputs = {"q", "k", "v"},
                      .settings = {{"normalize", true, {}}, {"eps", 1e-12, {}}},
                      .bind = &BindSettings,
                      .docs = doc::kDocs});
}

}  // namespace heed::based
