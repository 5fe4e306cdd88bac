// heed.mlstm, heed.mlstm_backward and heed.mlstm_step.
#include "heed/ops/gated/mlstm/mlstm.h"

#include "docstrings/mlstm.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::mlstm {
namespace {

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  Options own;
  own.eps = std::get<double>(settings.at("eps"));
  recurrent::Functions functions =
      recurrent::FunctionsOf<Options>(own, {&Forward, &Backward, &Step, &Explain});
  functions.normalizer = true;
  return functions;
}

}  // namespace

void Bind(nanobind::module_& m) {
  recurrent::Bind(m, {.name = "mlstm",
                      .inputs = {"q", "k", "v", {"i", recurrent::Input::kTensor}, "f"},
                      .settings = {{"eps", 1e-6, {}}},
                      .has_maximum = true,
                      .bind = &BindSettings,
                      .docs = doc::kDocs});
}

}  // namespace heed::mlstm
