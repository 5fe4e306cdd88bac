// Kernels whose blocks are objects: Block<GpuMachine>(machine, params).Run(), in Block::kSharedBytes of shared memory.
#ifndef HEED_CUDA_BLOCK_KERNEL_H_
#define HEED_CUDA_BLOCK_KERNEL_H_

#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/cuda/library.h"

namespace heed::cuda {

template <int kThreads, class Block, class Params>
__global__ void __launch_bounds__(kThreads) BlockKernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Params) <= 32764, "a launch takes no more arguments");
  extern __shared__ __align__(128) char shared[];
  GpuMachine machine(shared);
  Block(machine, params).Run();
}

template <int kThreads, template <class> class Block, class Params>
const char* LaunchBlocks(const Launch& launch, const Params& params) {
  using OnGpu = Block<GpuMachine>;
  return LaunchKernel(launch, kThreads, OnGpu::kSharedBytes, &BlockKernel<kThreads, OnGpu, Params>, params);
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_BLOCK_KERNEL_H_
