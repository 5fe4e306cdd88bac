// What the kernels of GPUs are given: a problem in numbers that fit a launch.
#ifndef HEED_ENGINES_SCAN_CUDA_PARAMS_H_
#define HEED_ENGINES_SCAN_CUDA_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/numbers.h"

namespace heed::scan::cuda {

// Elements between tokens, between columns, which are channels or states, and between groups.
struct DeviceTokens {
  const void* data = nullptr;  // or none
  DType dtype = DType::kF32;
  int64_t token = 0, column = 0, group = 0;
};

// Over channels and states: constants, or a sequence's states, which are f32.
struct DeviceNumbers {
  const void* data = nullptr;  // or none
  DType dtype = DType::kF32;
  int64_t channel = 0, state = 0;
};

// One per group and token, or constants of each channel.
struct DeviceWeights {
  DeviceTokens tokens;
  DeviceNumbers constants;  // present: these instead
};

// A Sequence, and where what is its own begins, in elements.
struct DeviceSequence {
  int64_t x, delta, gate, o, B, C, initial, final;
  int64_t tokens;
  int64_t first_tile;  // of all sequences' of the launch
};

// Launches of more sequences are several: they travel with the other arguments.
inline constexpr int kMostSequences = 64;
inline constexpr int kMostStates = 128;
inline constexpr int kTokens = 16;        // of a tile
inline constexpr int kChunkTokens = 128;  // of a sum in f32

// The forward pass, or, where o is absent, states before each tile.
struct ScanParams {
  DeviceTokens x, delta, gate, o;
  DeviceWeights B, C;
  DeviceNumbers A, skip, bias, initial, final;
  float* boundary_states = nullptr;  // [tile][strip][thread][states of a thread], or none
  int32_t channels, states, groups;
  int32_t channel_blocks;  // of each group's channels
  bool softplus;
  DeviceSequence sequences[kMostSequences] = {};
};

// A DeviceSequence's gradients.
struct GradientSequence {
  int64_t d_o, dx, ddelta, dgate, d_final, dinitial;
  int64_t index;        // of all sequences
  int64_t first_token;  // of all sequences' of the launch
};

// The backward pass, of a problem without o and final states. What is not asked for is absent.
struct GradientParams {
  ScanParams scan;
  DeviceTokens d_o, dx, ddelta, dgate;
  DeviceNumbers d_final, dinitial;
  // Sums over the channels of a block, [strip of a group][token][group][state]; where they are constants, none.
  float *B_partials = nullptr, *C_partials = nullptr;
  int64_t tokens;  // of all sequences of the launch
  // Of constants over a sequence's tokens, [sequence][row][channel]: states of A, then of B and C where they are
  // constants, skip, bias.
  heed::cuda::Sum* sums = nullptr;
  GradientSequence sequences[kMostSequences] = {};

  HEED_HOST_DEVICE int rows_of(const DeviceWeights& weights) const {
    return weights.constants.data != nullptr ? scan.states : 0;
  }
  HEED_HOST_DEVICE int B_row() const { return scan.states; }
  HEED_HOST_DEVICE int C_row() const { return B_row() + rows_of(scan.B); }
  HEED_HOST_DEVICE int skip_row() const { return C_row() + rows_of(scan.C); }
  HEED_HOST_DEVICE int bias_row() const { return skip_row() + 1; }
  HEED_HOST_DEVICE int rows() const { return bias_row() + 1; }
};

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_PARAMS_H_
