// H3 on the scan engine.
#include "heed/ops/ssm/h3/h3_internal.h"

namespace heed::h3 {
namespace {

using scanning::Tensor;

constexpr Tensor kTensors[] = {
    {.name = "q", .axes = "BTHd", .input = &Inputs::q, .gradient = &Gradients::dq},
    {.name = "k", .axes = "BTHd", .input = &Inputs::k, .gradient = &Gradients::dk},
    {.name = "v", .axes = "BTHd", .input = &Inputs::v, .gradient = &Gradients::dv},
    {.name = "shift", .axes = "DW", .input = &Inputs::shift, .gradient = &Gradients::dshift},
    {.name = "log_dt", .axes = "H", .input = &Inputs::log_dt, .gradient = &Gradients::dlog_dt,
     .values = Tensor::kLogSteps},
    {.name = "log_A_real", .axes = "HN", .input = &Inputs::log_A_real,
     .gradient = &Gradients::dlog_A_real},
    {.name = "A_imag", .axes = "HN", .input = &Inputs::A_imag, .gradient = &Gradients::dA_imag},
    {.name = "C", .axes = "HN2", .input = &Inputs::C, .gradient = &Gradients::dC},
    {.name = "D", .axes = "H", .input = &Inputs::D, .gradient = &Gradients::dD, .optional = true},
    {.name = "shift_D", .axes = "D", .input = &Inputs::shift_D, .gradient = &Gradients::dshift_D,
     .optional = true},
};

void Place(const scanning::Call& call, const StepInputs& in, scan::Problem& p) {
  p.channels = call.sizes.H;
  p.head_channels = call.sizes.d;
  p.num_key_taps = call.sizes.W;
  p.x = call.TokensOf(in.q);
  p.key = call.TokensOf(in.k);
  p.value = call.TokensOf(in.v);
  p.key_taps = call.NumbersOf(in.shift);
  p.key_skip = call.NumbersOf(in.shift_D);
  p.log_dt = call.NumbersOf(in.log_dt);
  p.log_A_real = call.NumbersOf(in.log_A_real);
  p.A_imag = call.NumbersOf(in.A_imag);
  p.C_modes = call.NumbersOf(in.C);
  p.skip = call.NumbersOf(in.D);
}

void PlaceGradients(const scanning::Call& call, const Gradients& out, scan::Gradients& g) {
  g.dx = call.TokensOf(out.dq);
  g.dkey = call.TokensOf(out.dk);
  g.dvalue = call.TokensOf(out.dv);
  g.dkey_taps = call.NumbersOf(out.dshift);
  g.dkey_skip = call.NumbersOf(out.dshift_D);
  g.dlog_dt = call.NumbersOf(out.dlog_dt);
  g.dlog_A_real = call.NumbersOf(out.dlog_A_real);
  g.dA_imag = call.NumbersOf(out.dA_imag);
  g.dC_modes = call.NumbersOf(out.dC);
  g.dskip = call.NumbersOf(out.dD);
}

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.tensors = kTensors,
          .state_axes = "BHddN2",
          .tail_axes = "BwHd",
          .rule = scan::Rule::kHeads,
          .flops = 8,
          .place = &Place,
          .place_gradients = &PlaceGradients,
          .method = options.method == Method::kRecurrent     ? scan::Method::kRecurrent
                    : options.method == Method::kConvolution ? scan::Method::kConvolution
                                                             : scan::Method::kAuto};
}

HEED_DEFINE_RECURRENT(scanning, h3)

}  // namespace heed::h3
