// The causal convolution: its table, and the arguments of its kernels, which are checked pointers, strides and sizes.
#ifndef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INTERNAL_H_
#define HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INTERNAL_H_

#include <cstdint>
#include <vector>

#include "heed/core/context.h"
#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

namespace heed::causal_conv1d {

// Tensors have no roles, since the scan engine does not compute this filter.
inline constexpr Tensors<mechanism::Tensor> kTensors = {
    .x = {"x", "BDT"},
    .weight = {.name = "weight", .axes = "DW", .type = mechanism::kWide},
    .bias = {.name = "bias", .axes = "D", .type = mechanism::kWide, .optional = true},
};
inline constexpr States<mechanism::StateTensor> kStates = {.inputs = {"inputs", "BDw"}};

scanning::Definition DefinitionOf(const Options& options);

// The tokens of one sequence in the order of processing: `first`, first + 1, ... With `reverse`, token strides are
// negative and `first` counts from the other end.
struct Sequence {
  int64_t batch, state, first, count;
};

// A tensor over batch, channels and tokens; a state over sequences, channels and inputs. Strides are in elements; null
// data: absent.
struct Grid {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t batch = 0, channel = 0, token = 0;
};

// Consecutive tokens of one sequence, the unit of work of a task. Every sequence has a first run, even if empty.
struct Run {
  int64_t sequence, begin, end;
};
inline constexpr int64_t kRunTokens = 1024;
inline constexpr int64_t kGroupTokens = 128;  // tokens per sum before it is widened to f64
inline constexpr int64_t kMaxParts = 32;      // separate partial sums of dw and db

struct Problem {
  DType dtype = DType::kF32;  // of x and o
  int64_t D = 0, W = 1;
  bool silu = false;
  std::vector<Sequence> sequences;
  std::vector<Run> runs;
  Grid x, o;
  Grid weight, bias;  // over channels and taps
  Grid initial, final;

  // The axis in vector lanes: channels if they are contiguous, else tokens.
  bool channels_in_lanes = false;
};

// Outputs with null data are not computed.
struct GradientGrids {
  Grid d_o, d_final;
  Grid dx, dinitial, dweight, dbias;
};

void ForwardCpu(Context& ctx, const Problem& p);
int64_t ForwardBytes(const Context& ctx, const Problem& p);
void BackwardCpu(Context& ctx, const Problem& p, const GradientGrids& g);
int64_t BackwardBytes(const Context& ctx, const Problem& p);

// One token: p.final is the state, which is updated; all counts of p.sequences are 1.
void StepCpu(Context& ctx, const Problem& p);

}  // namespace heed::causal_conv1d

#endif  // HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INTERNAL_H_
