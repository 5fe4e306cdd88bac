// Parameters of the backward kernels.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"

namespace heed::softmax::cuda {

// Terms of a row that all gradient kernels read, in one 16-byte load.
struct alignas(16) RowTerms {
  float lse;
  float factor;  // of dP: w / (1 - dropout), with w what a sink leaves
  float delta;   // subtracted from factor dP
  float slope;   // ALiBi's
};

// Offsets of a sequence's gradients, in elements.
struct DeviceGradients {
  int64_t d_o, d_lse, dq, dk, dv;
  int64_t first_row;  // index of its first row among the rows of all sequences
};

struct BackwardParams {
  ForwardParams forward;  // reads o and lse
  const void* d_o;
  const float* d_lse;  // null: zero
  void *dq, *dk, *dv;  // null: not wanted
  Strides d_o_strides, d_lse_strides, dq_strides, dk_strides, dv_strides;
  RowTerms* terms;                  // [query head][row of all sequences]
  int64_t num_rows;                 // of a head
  float *sink_terms, *slope_terms;  // each row's term of a gradient, indexed like `terms`; null: not wanted
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

// The gradient of a bias: the sum of dS over the bias's axes of size 1.
struct BiasGradientParams {
  BackwardParams backward;
  void* dbias;
  DType dtype;
  int64_t sizes[4], strides[4];       // of batch entries, heads, queries and keys
  const GradientSequence* sequences;  // all sequences, in device memory
  int64_t num_sequences;
  int32_t num_heads;
};

// Sums of row terms, per head or per head and sequence.
struct HeadSumsParams {
  const float* terms;      // [head][row]
  int64_t num_rows;        // of a head
  const int64_t* offsets;  // [sums of a head + 1]: the first row of each sum
  void* sums;
  DType dtype;
  int64_t stride, head_stride;
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_
