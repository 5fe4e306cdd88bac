// Gradients on GPUs.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_BACKWARD_H_
#define HEED_ENGINES_RECURRENCE_CUDA_BACKWARD_H_

#include "heed/core/context.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence::cuda {

// Throws Unsupported for what has no gradients on this device, before anything is written.
void Backward(Context& ctx, const Problem& p, const Gradients& g);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_BACKWARD_H_
