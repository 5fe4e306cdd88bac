// Tables of scans for their bindings.
#include "python/mechanism/describe.h"

#include <algorithm>
#include <string>

namespace heed::scanning {

void Describe(const Definition& definition, binding::Binding& binding) {
  const binding::AxisNames names = {{'w', "W - 1"}};
  binding.states_together = true;
  binding.tensors = binding::ParametersOf(definition.table.tensors, names);
  for (binding::Parameter& parameter : binding.tensors) {
    // Scans read any strides. Autocast converts tensors over tokens, which have more than two axes.
    const std::string first = parameter.axes.substr(0, parameter.axes.find('|'));
    parameter.reading = binding::Parameter::kInPlace;
    parameter.cast = std::ranges::count(first, ',') > 1;
  }
  for (const StateTensor& state : definition.table.states) {
    binding.states.push_back({.name = state.name, .axes = binding::SpelledAxes(state.axes, names)});
  }
}

}  // namespace heed::scanning
