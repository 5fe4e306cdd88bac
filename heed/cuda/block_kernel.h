// Kernels that run a block object per thread: Block(machine, params).Run().
#ifndef HEED_CUDA_BLOCK_KERNEL_H_
#define HEED_CUDA_BLOCK_KERNEL_H_

#include <cstddef>

#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/cuda/library.h"

namespace heed::cuda {

template <class Block, int kThreads, int kBlocks, class Machine, class Params>
__global__ void __launch_bounds__(kThreads, kBlocks) BlockKernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Params) <= 32764, "a launch takes no more arguments");
  extern __shared__ __align__(1024) char shared[];  // alignment of swizzle atoms (shared_tile.h)
  Machine machine(shared);
  Block(machine, params).Run();
}

// Registers are limited so that `kBlocks` blocks fit on an SM at once.
template <class Block, int kThreads, int kBlocks = 1, class Machine = GpuMachine, class Params>
const char* LaunchBlock(const Launch& launch, size_t shared_bytes, const Params& params) {
  return LaunchKernel(launch, kThreads, shared_bytes, &BlockKernel<Block, kThreads, kBlocks, Machine, Params>, params);
}

// Launches blocks that declare their shared memory as kSharedBytes.
template <int kThreads, template <class> class Block, class Params>
const char* LaunchBlocks(const Launch& launch, const Params& params) {
  return LaunchBlock<Block<GpuMachine>, kThreads>(launch, Block<GpuMachine>::kSharedBytes, params);
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_BLOCK_KERNEL_H_
