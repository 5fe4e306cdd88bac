// The backward pass of attention on a GPU, on the side of the host.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_H_

#include "heed/core/context.h"
#include "heed/engines/softmax/backward.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax::cuda {

// Throws Unsupported, before anything is written, of gradients that there are no kernels of.
void Backward(Context& ctx, const Problem& p, const Gradients& g);

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_H_
