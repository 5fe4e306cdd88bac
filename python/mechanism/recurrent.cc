// Tables of recurrences for their bindings.
#include "python/mechanism/describe.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace heed::recurrent {

void Describe(const Definition& definition, binding::Binding& binding) {
  const recurrence::Feature feature = definition.feature;
  const char* features = "K";
  if (recurrence::IsRandom(feature)) {
    features = "M";
  } else if (recurrence::FeatureSize(feature, 3) != 3) {
    features = "F";
    binding.features = [feature](int64_t K) { return recurrence::FeatureSize(feature, K); };
  }
  const binding::AxisNames names = {{'G', "HV"}, {'N', "n"}, {'F', features}};
  binding.has_direction = definition.has_direction;
  binding.output = definition.value().name;
  binding.output_axes = binding::SpelledAxes(definition.o_axes(), names);
  binding.tensors = binding::ParametersOf(definition.table.tensors, names);
  for (size_t i = 0; i < binding.tensors.size(); ++i) {
    // A list of numbers may be the decays of heads.
    if (definition.table.tensors[i].role == Role::kLogDecay) binding.tensors[i].reading = binding::Parameter::kNumbers;
  }
  const bool normalize_is_chosen = std::ranges::any_of(
      binding.settings, [](const auto& spec) { return std::string_view(spec.name) == "normalize"; });
  for (const StateTensor& state : definition.table.states) {
    const bool is_chosen = state.role == StateTensor::kNormaliser && normalize_is_chosen;
    binding.states.push_back({.name = state.name,
                              .axes = binding::SpelledAxes(state.axes, names),
                              .has_gradient = state.differentiable(),
                              .setting = is_chosen ? "normalize" : ""});
  }
}

}  // namespace heed::recurrent
