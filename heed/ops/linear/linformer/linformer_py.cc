// heed.linformer and heed.linformer_backward.
#include "heed/ops/linear/linformer/linformer.h"

#include "docstrings/linformer.h"
#include "heed/ops/mechanism/binding_py.h"

namespace heed::linformer {
namespace {

struct Structs {
  using Inputs = linformer::Inputs;
  using BackwardInputs = linformer::BackwardInputs;
  using StepInputs = linformer::Inputs;
  using Outputs = linformer::Outputs;
  using Gradients = linformer::Gradients;
  using StepState = TensorView;
  using Explanation = linformer::Explanation;
};

}  // namespace

void Bind(nanobind::module_& m) {
  using binding::Parameter;
  const auto tensor = [](const char* name, const char* axes, Parameter::Reading reading,
                         ConstTensorView Inputs::*input, TensorView Gradients::*gradient) {
    return binding::TensorPlace<Structs>{
        {.name = name, .axes = axes, .reading = reading, .cast = true}, input, input, gradient};
  };
  binding::Bind<Structs, Options>(
      m, {.name = "linformer", .docs = doc::kDocs, .output = "v"},
      {{tensor("q", "B, T, H, K", Parameter::kRows, &Inputs::q, &Gradients::dq),
        tensor("k", "B, T, H, K", Parameter::kRows, &Inputs::k, &Gradients::dk),
        tensor("v", "B, T, HV, V", Parameter::kRows, &Inputs::v, &Gradients::dv),
        tensor("e", "R, C", Parameter::kInPlace, &Inputs::e, &Gradients::de),
        tensor("f", "R, C", Parameter::kInPlace, &Inputs::f, &Gradients::df)}},
      {&Forward, &Backward, nullptr, &Explain});
}

}  // namespace heed::linformer
