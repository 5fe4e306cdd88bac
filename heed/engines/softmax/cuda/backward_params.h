// What the backward kernels of GPUs are given.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"

namespace heed::softmax::cuda {

// What the passes need of a row, in one place, where one load brings it.
struct alignas(16) RowTerms {
  float lse;
  float factor;  // of dP: the sink's share taken off, over what dropout leaves
  float delta;   // what is taken off P factor dP
  float slope;   // of ALiBi
};

// Where the gradients of a sequence begin, in elements.
struct DeviceGradients {
  int64_t d_o, d_lse, dq, dk, dv;
  int64_t first_row;  // of its rows among those of all sequences
};

struct BackwardParams {
  ForwardParams forward;  // whose o and lse are read
  const void* d_o;
  const float* d_lse;  // or null: zero
  void *dq, *dk, *dv;  // or null: not wanted
  Strides d_o_strides, d_lse_strides, dq_strides, dk_strides, dv_strides;
  RowTerms* terms;                  // by query head and row of all sequences
  int64_t num_rows;                 // of a head
  float *sink_terms, *slope_terms;  // what each of these rows adds to a gradient; null: not wanted
  DeviceGradients gradients[kMostSequences] = {};

  HEED_HOST_DEVICE int64_t TermAt(const DeviceGradients& of, int64_t query, int64_t head) const {
    return head * num_rows + of.first_row + query;
  }
};

// A sequence and its gradients.
struct GradientSequence {
  DeviceSequence sequence;
  DeviceGradients gradients;
  int64_t batch;
};

// The gradient of a bias, which is the sum of dS over the axes that it repeats: those of size 1.
struct BiasGradientParams {
  BackwardParams backward;
  void* dbias;
  DType dtype;
  int64_t sizes[4], strides[4];       // by batch entry, head, query and key
  const GradientSequence* sequences;  // all of them, on the device
  int64_t num_sequences;
  int32_t num_heads;
};

// Sums of terms of rows, a number per head, or per head and sequence.
struct HeadSumsParams {
  const float* terms;      // by head and row
  int64_t num_rows;        // of a head
  const int64_t* offsets;  // [one more than sums of a head]: rows of each
  void* sums;
  DType dtype;
  int64_t stride, head_stride;
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_
