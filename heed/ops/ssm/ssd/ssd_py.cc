// heed.ssd, heed.ssd_backward and heed.ssd_step.
#include "heed/ops/ssm/ssd/ssd.h"

#include <tuple>

#include "docstrings/ssd.h"
#include "heed/ops/mechanism/binding_py.h"

namespace heed::ssd {
namespace {

struct Structs {
  using Inputs = ssd::Inputs;
  using BackwardInputs = ssd::BackwardInputs;
  using StepInputs = ssd::Inputs;
  using Outputs = ssd::Outputs;
  using Gradients = ssd::Gradients;
  using StepState = TensorView;
  using Explanation = ssd::Explanation;
};

Options Own(const binding::Settings& settings) {
  Options own;
  own.dt_softplus = settings.Get<bool>("dt_softplus");
  std::tie(own.dt_min, own.dt_max) = settings.Get<binding::Range>("dt_limit");
  return own;
}

binding::TensorPlace<Structs> Tensor(const binding::Parameter& parameter, ConstTensorView Inputs::*input,
                                     TensorView Gradients::*gradient) {
  return {parameter, input, input, gradient};
}

}  // namespace

void Bind(nanobind::module_& m) {
  using binding::Parameter;
  constexpr auto kNumbers = Parameter::kNumbers;
  constexpr auto kFractions = Parameter::kFractions;
  binding::Bind<Structs, Options>(
      m,
      {.name = "ssd",
       .inputs = "x dt A B C * D z dt_bias",
       .settings = {{"dt_softplus", false}, {"dt_limit", binding::Range(Options().dt_min, Options().dt_max)}},
       .docs = doc::kDocs,
       .in_python = {{"dt_limit", "(dt_min, dt_max): the limits of delta"}}},
      {.tensors =
           {Tensor({.name = "x", .axes = "B, T, H, P", .cast = true}, &Inputs::x, &Gradients::dx),
            Tensor({.name = "dt", .axes = "B, T, H", .reading = kNumbers, .values = kFractions}, &Inputs::dt,
                   &Gradients::ddt),
            Tensor({.name = "A", .axes = "H", .reading = kNumbers, .values = Parameter::kRates}, &Inputs::A,
                   &Gradients::dA),
            Tensor({.name = "B", .axes = "B, T, G, N", .cast = true}, &Inputs::B, &Gradients::dB),
            Tensor({.name = "C", .axes = "B, T, G, N", .cast = true}, &Inputs::C, &Gradients::dC),
            Tensor({.name = "D", .axes = "H, P|H", .reading = kNumbers}, &Inputs::D, &Gradients::dD),
            Tensor({.name = "z", .axes = "B, T, H, P", .cast = true}, &Inputs::z, &Gradients::dz),
            Tensor({.name = "dt_bias", .axes = "H", .reading = kNumbers}, &Inputs::dt_bias,
                   &Gradients::ddt_bias)},
       .states = {{.parameter = {.name = "S", .axes = "B, H, P, N"},
                   .initial = &Inputs::initial,
                   .d_final = &BackwardInputs::d_final,
                   .final = &Outputs::final,
                   .dinitial = &Gradients::dinitial,
                   .step = [](TensorView& state) -> TensorView& { return state; }}}},
      {&Forward, &Backward, &Step, &Explain, &Own});
}

}  // namespace heed::ssd
