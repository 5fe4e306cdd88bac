// Bindings of heed.mamba3, heed.mamba3_backward and heed.mamba3_step.
#include "docstrings/mamba3.h"
#include "heed/ops/ssm/mamba3/mamba3_internal.h"
#include "python/mechanism/binding.h"

namespace heed::mamba3 {

void Bind(nanobind::module_& m) {
  const binding::AxisNames names = {{'G', "HV"}, {'N', "R"}};
  std::vector<binding::StateParameter> states;
  for (const mechanism::StateTensor& state : mechanism::Members(kStates)) {
    states.push_back({.name = state.name, .axes = binding::SpelledAxes(state.axes, names)});
  }
  binding::Bind<Structs, Options>(m,
                                  {.name = "mamba3",
                                   .docs = doc::kDocs,
                                   .tensors = binding::ParametersOf(mechanism::Members(kTensors), names),
                                   .states = states,
                                   .states_together = true,
                                   .output = kTensors.v.name},
                                  HEED_FUNCTIONS);
}

}  // namespace heed::mamba3
