// Bindings of heed.linformer and heed.linformer_backward.
#include "docstrings/linformer.h"
#include "heed/ops/linear/linformer/linformer_internal.h"
#include "python/mechanism/binding.h"

namespace heed::linformer {

void Bind(nanobind::module_& m) {
  binding::Binding binding = {.name = "linformer", .docs = doc::kDocs};
  binding.tensors = binding::ParametersOf(mechanism::Members(kTensors), {{'G', "HV"}, {'M', "R"}, {'L', "C"}});
  for (binding::Parameter& parameter : binding.tensors) {
    parameter.cast = true;
    if (parameter.name == kTensors.e.name || parameter.name == kTensors.f.name) {
      parameter.reading = binding::Parameter::kInPlace;
    }
  }
  binding.output = "v";
  binding::Bind<Structs, Options>(m, binding, HEED_FUNCTIONS_WITHOUT_STEP);
}

}  // namespace heed::linformer
