// RG-LRU on the scan engine.
#include "heed/ops/gated/rg_lru/rg_lru.h"

#include <cmath>

#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "heed/ops/mechanism/check_internal.h"

namespace heed::rg_lru {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "x", .axes = "BTD", .input = &Inputs::x, .gradient = &Gradients::dx},
    {.name = "input_gate", .axes = "BTD", .input = &Inputs::input_gate,
     .gradient = &Gradients::dinput_gate},
    {.name = "recurrence_gate", .axes = "BTD", .input = &Inputs::recurrence_gate,
     .gradient = &Gradients::drecurrence_gate},
    {.name = "a", .axes = "D", .input = &Inputs::a, .gradient = &Gradients::da},
};

void Place(const scanning::Call& call, const StepInputs& in, scan::Problem& p) {
  p.x = call.TokensOf(in.x);
  p.input_gate = call.TokensOf(in.input_gate);
  p.recurrence_gate = call.TokensOf(in.recurrence_gate);
  p.lambda = call.NumbersOf(in.a);
}

void PlaceGradients(const scanning::Call& call, const Gradients& out, scan::Gradients& g) {
  g.dx = call.TokensOf(out.dx);
  g.dinput_gate = call.TokensOf(out.dinput_gate);
  g.drecurrence_gate = call.TokensOf(out.drecurrence_gate);
  g.dlambda = call.NumbersOf(out.da);
}

void CheckOptions(const char* op, const Options& options) {
  if (!(options.c > 0) || std::isinf(options.c)) {
    mechanism::Fail(op, "c", "is " + mechanism::Text(options.c), "a positive number");
  }
}

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.tensors = kTensors,
          .state_axes = "BD",
          .rule = scan::Rule::kGates,
          .flops = 30,
          .place = &Place,
          .place_gradients = &PlaceGradients,
          .c = options.c};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  CheckOptions("rg_lru::Forward", options);
  scanning::Forward("rg_lru::Forward", ctx, DefinitionOf(options), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  CheckOptions("rg_lru::Backward", options);
  scanning::Backward("rg_lru::Backward", ctx, DefinitionOf(options), in, options, out);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const StepState& state,
          const TensorView& o) {
  CheckOptions("rg_lru::Step", options);
  scanning::Step("rg_lru::Step", ctx, DefinitionOf(options), in, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::Workspace("rg_lru::Workspace", ctx, DefinitionOf(options), in, options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::BackwardWorkspace("rg_lru::BackwardWorkspace", ctx, DefinitionOf(options), in,
                                     options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  CheckOptions("rg_lru::Explain", options);
  return scanning::Explain("rg_lru::Explain", ctx, DefinitionOf(options), in, options);
}

}  // namespace heed::rg_lru
