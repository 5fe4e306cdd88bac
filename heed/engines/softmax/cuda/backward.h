// The backward pass of attention on a GPU: host code.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_H_
#define HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_H_

#include "heed/core/context.h"
#include "heed/engines/softmax/backward/backward.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax::cuda {

// Runs the blocks of the kernel `name`. Throws Unsupported, before anything is written, if a gradient is not
// implemented.
void Backward(const char* name, BlockLaunches Launches::* blocks, Context& ctx, const Problem& p, const Gradients& g);

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_BACKWARD_H_
