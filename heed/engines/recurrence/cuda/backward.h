// Gradients of recurrences on a GPU.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_BACKWARD_H_
#define HEED_ENGINES_RECURRENCE_CUDA_BACKWARD_H_

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence::cuda {

// Throws Unsupported, before anything is written, if a gradient is not implemented on this device.
void Backward(Context& ctx, const Problem& p, const Gradients& g);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_BACKWARD_H_
