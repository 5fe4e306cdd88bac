// Bindings of heed.causal_conv1d, heed.causal_conv1d_backward and heed.causal_conv1d_step.
#include <string>

#include "docstrings/causal_conv1d.h"
#include "python/mechanism/scanning.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  const bool silu = !settings.Get<std::string>("activation").empty();
  own.activation = silu ? Activation::kSilu : Activation::kNone;
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  auto tensors = binding::PlacesOf<Api>(kTensors);
  for (auto& tensor : tensors) scanning::ReadInPlace(tensor.parameter);
  binding::Bind<Api, Options>(m,
                              {.name = "causal_conv1d",
                               .inputs = "x weight bias state dstate",
                               .settings = {{"activation", std::string(), {"silu", "swish"}}},
                               .docs = doc::kDocs,
                               .in_python = {{"activation", "'silu', which is 'swish' too, or None"},
                                             {"initial_state",
                                              "[B, D, W - 1]: the inputs before the first token, oldest first; f32, or "
                                              "f64 beside f64; absent: zeros"}},
                               .states_together = true},
                              {.tensors = tensors,
                               .states = {{.parameter = {.name = "inputs", .axes = "B, D, W - 1"},
                                           .initial = &Inputs::initial,
                                           .d_final = &BackwardInputs::d_final,
                                           .final = &Outputs::final,
                                           .dinitial = &Gradients::dinitial,
                                           .step = [](TensorView& state) -> TensorView& { return state; }}}},
                              {&Forward, &Backward, &Step, &Explain, &Own});
}

}  // namespace heed::causal_conv1d
