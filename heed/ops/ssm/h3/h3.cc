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
    {.name = "log_dt",
     .axes = "H",
     .input = &Inputs::log_dt,
     .gradient = &Gradients::dlog_dt,
     .values = Tensor::kLogSteps},
    {.name = "log_A_real", .axes = "HN", .input = &Inputs::log_A_real, .gradient = &Gradients::dlog_A_real},
    {.name = "A_imag", .axes = "HN", .input = &Inputs::A_imag, .gradient = &Gradients::dA_imag},
    {.name = "C", .axes = "HN2", .input = &Inputs::C, .gradient = &Gradients::dC},
    {.name = "D", .axes = "H", .input = &Inputs::D, .gradient = &Gradients::dD, .optional = true},
    {.name = "shift_D", .axes = "D", .input = &Inputs::shift_D, .gradient = &Gradients::dshift_D, .optional = true},
};

}  // namespace

scanning::Definition DefinitionOf(const Options& options) {
  return {.tensors = kTensors,
          .state_axes = "BHddN2",
          .tail_axes = "BwHd",
          .rule = scan::Rule::kHeads,
          .flops = 8,
          .method = options.method == Method::kRecurrent     ? scan::Method::kRecurrent
                    : options.method == Method::kConvolution ? scan::Method::kConvolution
                                                             : scan::Method::kAuto};
}

HEED_DEFINE_RECURRENT(scanning, h3)

}  // namespace heed::h3
