// The causal convolution: its table, and what its kernels compute, pointers, strides and sizes, all
// checked.
#ifndef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INTERNAL_H_
#define HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/mechanism/scanning_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

namespace heed::causal_conv1d {

// Its table, in the letters of its header; states are [B, D, w], w = W - 1.
using Tensor = mechanism::Tensor<Inputs, StepInputs, Gradients>;
using Api = mechanism::ApiOf<Tensor, Inputs, BackwardInputs, StepInputs, TensorView, Outputs, Gradients, Explanation>;
inline constexpr Tensor kTensors[] = {
    {.name = "x", .axes = "BDT", .input = &Inputs::x, .step = &StepInputs::x, .gradient = &Gradients::dx},
    {.name = "weight",
     .axes = "DW",
     .input = &Inputs::weight,
     .step = &StepInputs::weight,
     .gradient = &Gradients::dweight,
     .type = Tensor::kWide},
    {.name = "bias",
     .axes = "D",
     .input = &Inputs::bias,
     .step = &StepInputs::bias,
     .gradient = &Gradients::dbias,
     .type = Tensor::kWide,
     .optional = true},
};
scanning::Definition DefinitionOf(const Options& options);

// The tokens of one sequence in the order in which they are taken: `first`, first + 1, ...
// In a call that runs backwards token strides are negative, and `first` counts from the
// other end with them.
struct Sequence {
  int64_t batch, state, first, count;
};

// A tensor over batch, channels and tokens; a state over sequences, channels and inputs.
// Strides count elements; null data: absent.
struct Grid {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch = 0, channel = 0, token = 0;
};

// Consecutive tokens of one sequence: what a task takes of it. Every sequence has a first
// run, be it empty.
struct Run {
  int64_t sequence, begin, end;
};
inline constexpr int64_t kRunTokens = 1024;
inline constexpr int64_t kGroupTokens = 128;  // of a sum that is not yet widened to f64
inline constexpr int64_t kMaxParts = 32;      // sums of dw and db that are kept apart

struct Problem {
  DType dtype = DType::kF32;  // of x and o
  int64_t D = 0, W = 1;
  bool silu = false;
  std::vector<Sequence> sequences;
  std::vector<Run> runs;
  Grid x, o;
  Grid weight, bias;  // over channels and taps
  Grid initial, final;

  // Which of the two stands in the lanes of vectors: what is contiguous.
  bool channels_in_lanes = false;
};

// Outputs whose data is null are not asked for.
struct GradientGrids {
  Grid d_o, d_final;
  Grid dx, dinitial, dweight, dbias;
};

void ForwardCpu(Context& ctx, const Problem& p);
int64_t ForwardBytes(const Context& ctx, const Problem& p);
void BackwardCpu(Context& ctx, const Problem& p, const GradientGrids& g);
int64_t BackwardBytes(const Context& ctx, const Problem& p);

// One token: p.final is the state, read and written; p.sequences has nothing but counts
// of 1.
void StepCpu(Context& ctx, const Problem& p);

}  // namespace heed::causal_conv1d

#endif  // HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INTERNAL_H_
