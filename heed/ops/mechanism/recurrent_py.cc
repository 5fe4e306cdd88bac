// Tables of recurrences for their bindings.
#include "heed/ops/mechanism/recurrent_py.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace heed::recurrent {
namespace {

// S, z or m, by the place of its member.
template <auto kConst, auto kMember>
binding::StatePlace<Structs> PlaceOf(const char* name, const std::string& axes) {
  return {.parameter = {.name = name[0] == '.' ? name + 1 : "S", .axes = axes},
          .initial = [](BackwardInputs& in) -> ConstTensorView& { return in.initial.*kConst; },
          .d_final = [](BackwardInputs& in) -> ConstTensorView& { return in.d_final.*kConst; },
          .final = [](Outputs& out) -> TensorView& { return out.final.*kMember; },
          .dinitial = [](Gradients& out) -> TensorView& { return out.dinitial.*kMember; },
          .step = kMember};
}

}  // namespace

binding::Table<Structs> TableOf(const Definition& definition, binding::Binding& binding) {
  Definition d = definition;
  d.causal = true;  // which the call says
  binding.output = d.value_name;
  binding.output_axes = d.channels ? "B, T, C" : "B, T, HV, V";
  binding::Table<Structs> table = {binding::PlacesOf<Structs>(Tensors(d), {{'G', "HV"}, {'N', "n"}})};
  for (auto& [parameter, input, step, gradient] : table.tensors) {
    if (step == &StepInputs::log_decay) parameter.reading = binding::Parameter::kNumbers;  // whatever it decays
    if (step == &StepInputs::q) parameter.said_of = "q";
    if (step == &StepInputs::v) parameter.said_of = "v";
  }
  std::string rows = recurrence::IsRandom(d.feature) ? "M" : "K";
  if (rows == "K" && recurrence::FeatureSize(d.feature, 3) != 3) {
    rows = "F";
    binding.features = [feature = d.feature](int64_t K) { return recurrence::FeatureSize(feature, K); };
  }
  const std::string S = d.value_first ? "B, HV, V, " + rows : "B, HV, " + rows + ", V";
  const auto axes = [&](const std::string& of_heads) { return d.channels ? "B, C" : of_heads; };
  table.states.push_back(PlaceOf<&ConstState::S, &State::S>(d.state_names[0], axes(S)));
  if (d.normalize) {
    table.states.push_back(PlaceOf<&ConstState::z, &State::z>(d.state_names[1], axes("B, HV, " + rows)));
    const bool chosen = std::ranges::any_of(
        binding.settings, [](const auto& spec) { return std::string_view(spec.name) == "normalize"; });
    if (chosen) table.states.back().parameter.setting = "normalize";
  }
  if (HasMaximum(d)) {
    table.states.push_back(PlaceOf<&ConstState::m, &State::m>(d.state_names[2], axes("B, HV")));
    table.states.back().parameter.has_gradient = false;
  }
  return table;
}

}  // namespace heed::recurrent
