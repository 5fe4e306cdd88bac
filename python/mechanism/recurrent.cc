// Tables of recurrences for their bindings.
#include "python/mechanism/recurrent.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace heed::recurrent {

binding::Table<Api> TableOf(const Definition& definition, binding::Binding& binding) {
  Definition d = definition;
  d.causal = true;  // set by each call
  const char* features = "K";
  if (recurrence::IsRandom(d.feature)) {
    features = "M";
  } else if (recurrence::FeatureSize(d.feature, 3) != 3) {
    features = "F";
    binding.features = [feature = d.feature](int64_t K) { return recurrence::FeatureSize(feature, K); };
  }
  const binding::AxisNames names = {{'G', "HV"}, {'N', "n"}, {'F', features}};
  binding.output = d.value_name;
  binding.output_axes = binding::SpelledAxes(OutputAxes(d), names);
  binding::Table<Api> table = {binding::PlacesOf<Api>(Tensors(d), names)};
  for (auto& [parameter, input, step, gradient] : table.tensors) {
    if (step == &StepInputs::log_decay) parameter.reading = binding::Parameter::kNumbers;  // any axes of decay
    if (step == &StepInputs::q) parameter.said_of = "q";
    if (step == &StepInputs::v) parameter.said_of = "v";
  }
  const bool normalize_is_chosen = std::ranges::any_of(
      binding.settings, [](const auto& spec) { return std::string_view(spec.name) == "normalize"; });
  const char* const* name = d.state_names;  // after a dot
  for (const auto& [suffix, axes, read, written, exists] : StateTensors(d)) {
    const std::string_view own = *name++;
    if (!exists) continue;
    binding::StateParameter parameter = {.name = std::string(own.empty() ? "S" : own.substr(1)),
                                         .axes = binding::SpelledAxes(axes, names)};
    parameter.has_gradient = read != &ConstState::m;
    if (read == &ConstState::z && normalize_is_chosen) parameter.setting = "normalize";
    table.states.push_back({.parameter = parameter,
                            .initial = [r = read](BackwardInputs& in) -> ConstTensorView& { return in.initial.*r; },
                            .d_final = [r = read](BackwardInputs& in) -> ConstTensorView& { return in.d_final.*r; },
                            .final = [w = written](Outputs& out) -> TensorView& { return out.final.*w; },
                            .dinitial = [w = written](Gradients& out) -> TensorView& { return out.dinitial.*w; },
                            .step = written});
  }
  return table;
}

}  // namespace heed::recurrent
