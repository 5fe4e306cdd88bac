// Tables of scans for their bindings.
#include "python/mechanism/scanning.h"

#include <algorithm>
#include <string>

namespace heed::scanning {

void ReadInPlace(binding::Parameter& parameter) {
  const std::string first = parameter.axes.substr(0, parameter.axes.find('|'));
  parameter.reading = binding::Parameter::kInPlace;
  parameter.cast = std::ranges::count(first, ',') > 1;
}

binding::Table<Api> TableOf(const Definition& definition) {
  binding::Table<Api> table = {binding::PlacesOf<Api>(definition.tensors)};
  for (auto& tensor : table.tensors) ReadInPlace(tensor.parameter);
  for (const StateTensor& state : definition.states()) {
    const std::string axes = binding::SpelledAxes(state.axes, {{'w', "W - 1"}});
    table.states.push_back({.parameter = {.name = state.name, .axes = axes},
                            .initial = state.initial,
                            .d_final = state.d_final,
                            .final = state.final,
                            .dinitial = state.dinitial,
                            .step = state.step});
  }
  return table;
}

}  // namespace heed::scanning
