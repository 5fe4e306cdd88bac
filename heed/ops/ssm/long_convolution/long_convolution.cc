// The long convolution on the scan engine.
#include "heed/ops/ssm/long_convolution/long_convolution.h"

#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"

namespace heed::long_convolution {
namespace {

using scanning::StepInputs;
using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "u", .axes = "BDT", .input = &Inputs::u, .gradient = &Gradients::du},
    {.name = "kernel", .axes = "DL", .input = &Inputs::kernel, .gradient = &Gradients::dkernel},
    {.name = "D", .axes = "D", .input = &Inputs::D, .gradient = &Gradients::dD, .optional = true},
};

void Place(const scanning::Call& call, const StepInputs& in, scan::Problem& p) {
  p.x = call.TokensOf(in.u);
  p.taps = call.NumbersOf(in.kernel);
  p.skip = call.NumbersOf(in.D);
}

void PlaceGradients(const scanning::Call& call, const Gradients& out, scan::Gradients& g) {
  g.dx = call.TokensOf(out.du);
  g.dtaps = call.NumbersOf(out.dkernel);
  g.dskip = call.NumbersOf(out.dD);
}

}  // namespace

scanning::Definition DefinitionOf(const Options&) {
  return {.tensors = kTensors,
          .state_axes = "",
          .rule = scan::Rule::kTaps,
          .flops = 2,
          .place = &Place,
          .place_gradients = &PlaceGradients};
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  scanning::Forward("long_convolution::Forward", ctx, DefinitionOf(options), in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  scanning::Backward("long_convolution::Backward", ctx, DefinitionOf(options), in, options, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::Workspace("long_convolution::Workspace", ctx, DefinitionOf(options), in,
                             options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::BackwardWorkspace("long_convolution::BackwardWorkspace", ctx,
                                     DefinitionOf(options), in, options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return scanning::Explain("long_convolution::Explain", ctx, DefinitionOf(options), in, options);
}

}  // namespace heed::long_convolution
