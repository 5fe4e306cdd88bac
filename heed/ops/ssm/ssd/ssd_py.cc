// heed.ssd, heed.ssd_backward and heed.ssd_step.
#include "heed/ops/ssm/ssd/ssd.h"

#include <cmath>
#include <tuple>

#include "docstrings/ssd.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::ssd {
namespace {

template <class View>
View Find(const recurrent::Others<View>& others, const char* name) {
  const auto found = others.find(name);
  return found == others.end() ? View() : found->second;
}

template <class Arguments>
Inputs InputsOf(const Arguments& a) {
  Inputs in;
  in.x = a.v;
  in.B = a.k;
  in.C = a.q;
  in.dt = Find(a.others, "dt");
  in.A = Find(a.others, "A");
  in.D = Find(a.others, "D");
  in.z = Find(a.others, "z");
  in.dt_bias = Find(a.others, "dt_bias");
  return in;
}

recurrent::Functions BindSettings(const recurrent::Settings& settings) {
  using Common = recurrent::Options;
  Options own;
  own.dt_softplus = std::get<bool>(settings.at("dt_softplus"));
  std::tie(own.dt_min, own.dt_max) = std::get<recurrent::Range>(settings.at("dt_limit"));
  const auto with = [own](const Common& common) {
    Options options = own;
    static_cast<Common&>(options) = common;
    return options;
  };
  const auto inputs = [](const recurrent::Arguments& a) {
    Inputs in = InputsOf(a);
    in.initial = a.initial.S;
    return in;
  };
  return {
      .forward =
          [=](Context& ctx, const recurrent::Arguments& a, const Common& options,
              const recurrent::Outputs& out) {
            Forward(ctx, inputs(a), with(options), {out.o, out.final.S});
          },
      .backward =
          [=](Context& ctx, const recurrent::Arguments& a, const Common& options,
              const recurrent::Results& out) {
            Backward(ctx, {inputs(a), a.d_o, a.d_final.S}, with(options),
                     {.dx = out.dv,
                      .ddt = Find(out.others, "dt"),
                      .dA = Find(out.others, "A"),
                      .dB = out.dk,
                      .dC = out.dq,
                      .dD = Find(out.others, "D"),
                      .dz = Find(out.others, "z"),
                      .ddt_bias = Find(out.others, "dt_bias"),
                      .dinitial = out.dinitial.S});
          },
      .step =
          [=](Context& ctx, const recurrent::StepArguments& a, const Common& options,
              const recurrent::State& state, const TensorView& o) {
            Step(ctx, InputsOf(a), with(options), state.S, o);
          },
      .explain =
          [=](const Context& ctx, const recurrent::Arguments& a, const Common& options) {
            return Explain(ctx, inputs(a), with(options));
          },
      .value_first = true};
}

}  // namespace

void Bind(nanobind::module_& m) {
  using recurrent::Input;
  recurrent::Bind(m, {.name = "ssd",
                      .inputs = {{"x", Input::kValue},
                                 {"dt", Input::kConstants},
                                 {"A", Input::kConstants},
                                 {"B", Input::kKey},
                                 {"C", Input::kQuery},
                                 {"D", Input::kConstants, true},
                                 {"z", Input::kOther, true},
                                 {"dt_bias", Input::kConstants, true}},
                      .settings = {{"dt_softplus", false, {}},
                                   {"dt_limit", recurrent::Range(0, HUGE_VAL), {}}},
                      .bind = &BindSettings,
                      .docs = doc::kDocs,
                      .in_python = {{"dt_limit", "(dt_min, dt_max): the limits of delta"}}});
}

}  // namespace heed::ssd
