// Bindings of heed.ssd, heed.ssd_backward and heed.ssd_step.
#include <tuple>

#include "docstrings/ssd.h"
#include "python/mechanism/binding.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::ssd {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.dt_softplus = settings.Get<bool>("dt_softplus");
  std::tie(own.dt_min, own.dt_max) = settings.Get<binding::Range>("dt_limit");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(
      m,
      {.name = "ssd",
       .settings = {{"dt_softplus", false}, {"dt_limit", binding::Range(Options().dt_min, Options().dt_max)}},
       .docs = doc::kDocs,
       .in_python = {{"dt_limit", "(dt_min, dt_max): the limits of delta"}},
       .tensors = binding::ParametersOf(mechanism::Members(kTensors)),
       .states = {{.name = kStates.S.name, .axes = binding::SpelledAxes(kStates.S.axes, {})}}},
      HEED_FUNCTIONS, &Own);
}

}  // namespace heed::ssd
