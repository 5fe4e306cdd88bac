// What the backward kernels of GPUs are given.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_

#include <cstdint>

#include "heed/engines/softmax/cuda/forward_params.h"

namespace heed::softmax::cuda {

// What the passes need of a row besides its lse.
struct RowTerms {
  float factor;  // of dP: the sink's share taken off, over what dropout leaves
  float delta;   // what is taken off P factor dP
};

// Where the gradients of a sequence begin, in elements, and its terms.
struct DeviceGradients {
  int64_t d_o, d_lse, dq, dk, dv, terms;
};

struct BackwardParams {
  ForwardParams forward;  // whose o and lse are read
  const void* d_o;
  const float* d_lse;    // or null: zero
  void *dq, *dk, *dv;    // or null: not wanted
  Strides d_o_strides, d_lse_strides, dq_strides, dk_strides, dv_strides;
  RowTerms* terms;       // by sequence, query head and query
  DeviceGradients gradients[kMostSequences] = {};
};

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_PARAMS_H_
