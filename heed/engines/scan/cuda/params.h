// Parameters of the scan kernels: a problem in structs that fit a launch.
#ifndef HEED_ENGINES_SCAN_CUDA_PARAMS_H_
#define HEED_ENGINES_SCAN_CUDA_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/numbers.h"

namespace heed::scan::cuda {

// A tensor over tokens, with strides in elements between tokens, columns (channels or states) and groups.
struct DeviceTokens {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t token = 0, column = 0, group = 0;
};

// A tensor over channels and states: constants of any dtype, or a sequence's states in f32.
struct DeviceNumbers {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t channel = 0, state = 0;
};

// B or C: per group and token, or constants per channel.
struct DeviceWeights {
  DeviceTokens tokens;
  DeviceNumbers constants;  // if present, used instead
};

// A Sequence with the offsets of its data, in elements.
struct DeviceSequence {
  int64_t x, delta, gate, o, B, C, initial, final;
  int64_t tokens;
  int64_t first_tile;  // index among the tiles of all sequences of the launch
};

// A call with more sequences has several launches: they are launch parameters.
inline constexpr int kMostSequences = 64;
inline constexpr int kMostStates = 128;
inline constexpr int kTokens = 16;        // tokens per tile
inline constexpr int kChunkTokens = 128;  // tokens per sum in f32

// The forward pass; if o is absent, it computes the states before each tile.
struct ScanParams {
  DeviceTokens x, delta, gate, o;
  DeviceWeights B, C;
  DeviceNumbers A, skip, bias, initial, final;
  float* boundary_states = nullptr;  // [tile][channel block][thread][states of a thread]; null: absent
  int32_t channels, states, groups;
  int32_t channel_blocks;  // blocks of channels per group
  bool softplus;
  DeviceSequence sequences[kMostSequences] = {};
};

// Offsets of a DeviceSequence's gradients.
struct GradientSequence {
  int64_t d_o, dx, ddelta, dgate, d_final, dinitial;
  int64_t index;        // index among all sequences
  int64_t first_token;  // index among the tokens of all sequences of the launch
};

// The backward pass; o and final states are absent, and so are gradients that are not wanted.
struct GradientParams {
  ScanParams scan;
  DeviceTokens d_o, dx, ddelta, dgate;
  DeviceNumbers d_final, dinitial;
  // Sums over a block's channels, [channel block of a group][token][group][state]; null if B or C are constants.
  float *B_partials = nullptr, *C_partials = nullptr;
  int64_t tokens;  // over all sequences of the launch
  // Sums of constants' gradients over a sequence's tokens, [sequence][row][channel]. Rows are the states of A, those of
  // B and C if they are constants, skip, and bias.
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
