// heed.efficient_attention and heed.efficient_attention_backward.
#include "heed/ops/linear/efficient_attention/efficient_attention.h"

#include "docstrings/efficient_attention.h"
#include "heed/ops/mechanism/recurrent_py.h"

namespace heed::efficient_attention {
namespace {

// The mask is an option in C++.
struct Arguments : BackwardInputs {
  ConstTensorView kv_mask;
};
struct Structs : recurrent::Structs {
  using Inputs = Arguments;
  using BackwardInputs = Arguments;
  using StepInputs = Arguments;
};

Options With(Options options, const Arguments& in) {
  options.kv_mask = in.kv_mask;
  return options;
}

}  // namespace

void Bind(nanobind::module_& m) {
  using binding::Parameter;
  const auto tensor = [](const Parameter& parameter, ConstTensorView Arguments::*input,
                         TensorView Gradients::*gradient) {
    return binding::TensorPlace<Structs>{parameter, input, input, gradient};
  };
  binding::Bind<Structs, Options>(
      m,
      {.name = "efficient_attention",
       .inputs = "q k v * kv_mask",
       .docs = doc::kDocs,
       .has_direction = false,
       .output = "v"},
      {.tensors = {tensor({.name = "q", .axes = "B, T, H, K", .cast = true}, &Inputs::q, &Gradients::dq),
                   tensor({.name = "k", .axes = "B, T, H, K", .cast = true}, &Inputs::k, &Gradients::dk),
                   tensor({.name = "v", .axes = "B, T, HV, V", .cast = true}, &Inputs::v, &Gradients::dv),
                   tensor({.name = "kv_mask", .axes = "B, T", .reading = Parameter::kMask},
                          &Arguments::kv_mask, nullptr)}},
      {.forward = [](Context& ctx, const Arguments& in, const Options& options,
                     const Outputs& out) { Forward(ctx, in, With(options, in), out); },
       .backward = [](Context& ctx, const Arguments& in, const Options& options,
                      const Gradients& out) { Backward(ctx, in, With(options, in), out); },
       .step = nullptr,
       .explain = [](const Context& ctx, const Arguments& in,
                     const Options& options) { return Explain(ctx, in, With(options, in)); }});
}

}  // namespace heed::efficient_attention
