// Bindings of heed.linformer and heed.linformer_backward.
#include "docstrings/linformer.h"
#include "heed/ops/linear/linformer/linformer_internal.h"
#include "python/mechanism/binding.h"

namespace heed::linformer {

void Bind(nanobind::module_& m) {
  auto tensors = binding::PlacesOf<Api>(kTensors, {{'G', "HV"}, {'M', "R"}, {'L', "C"}});
  for (auto& [parameter, input, step, gradient] : tensors) {
    parameter.cast = true;
    if (input == &Inputs::e || input == &Inputs::f) parameter.reading = binding::Parameter::kInPlace;
  }
  binding::Bind<Api, Options>(m, {.name = "linformer", .docs = doc::kDocs, .output = "v"}, {tensors},
                              {&Forward, &Backward, nullptr, &Explain});
}

}  // namespace heed::linformer
