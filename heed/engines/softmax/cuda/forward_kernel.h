// The launch of a forward block, for the files that compile them.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_KERNEL_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_KERNEL_H_

#include "heed/cuda/block_kernel.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {

template <class Shape, bool kGeneral, class Machine = heed::cuda::GpuMachine>
const char* LaunchForward(const heed::cuda::Launch& launch, const ForwardParams& params) {
  using Block = ForwardBlock<Machine, Shape, kGeneral>;
  return heed::cuda::LaunchBlock<Block, Shape::kThreads, Shape::kBlocks, Machine>(launch, Shape::kSharedBytes, params);
}

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_KERNEL_H_
