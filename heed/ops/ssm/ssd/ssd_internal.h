// Common parts of the files of SSD: its table and its tolerances.
#ifndef HEED_OPS_SSM_SSD_SSD_INTERNAL_H_
#define HEED_OPS_SSM_SSD_SSD_INTERNAL_H_

#include "heed/mechanism/table_internal.h"
#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::ssd {

// The axes of the table, in the letters of ssd.h.
using Tensor = mechanism::Tensor<Inputs, Inputs, Gradients>;
using Api = mechanism::ApiOf<Tensor, Inputs, BackwardInputs, Inputs, TensorView, Outputs, Gradients, Explanation>;
inline constexpr Tensor kTensors[] = {
    {.name = "x", .axes = "BTHP", .input = &Inputs::x, .gradient = &Gradients::dx},
    {.name = "dt",
     .axes = "BTH",
     .input = &Inputs::dt,
     .gradient = &Gradients::ddt,
     .type = Tensor::kWide,
     .values = Tensor::kSteps},
    {.name = "A",
     .axes = "H",
     .input = &Inputs::A,
     .gradient = &Gradients::dA,
     .type = Tensor::kAnyFloat,
     .values = Tensor::kRates},
    {.name = "B", .axes = "BTGN", .input = &Inputs::B, .gradient = &Gradients::dB},
    {.name = "C", .axes = "BTGN", .input = &Inputs::C, .gradient = &Gradients::dC},
    {.name = "D",
     .axes = "HP|H",
     .input = &Inputs::D,
     .gradient = &Gradients::dD,
     .type = Tensor::kAnyFloat,
     .optional = true},
    {.name = "z", .axes = "BTHP", .input = &Inputs::z, .gradient = &Gradients::dz, .optional = true},
    {.name = "dt_bias",
     .axes = "H",
     .input = &Inputs::dt_bias,
     .gradient = &Gradients::ddt_bias,
     .type = Tensor::kAnyFloat,
     .values = Tensor::kStepBiases,
     .optional = true},
};

// The tolerance of each output, derived in ssd_reference.cc.
void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance);

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_INTERNAL_H_
