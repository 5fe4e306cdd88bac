// Blocks of attention forward as kernels of GPUs, for the files that compile them.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_FORWARD_KERNEL_H_
#define HEED_ENGINES_SOFTMAX_CUDA_FORWARD_KERNEL_H_

#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {

static_assert(sizeof(ForwardParams) <= 32764, "a launch takes no more arguments");

template <DType kDType, class Shape, bool kGeneral>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) ForwardKernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  ForwardBlock<heed::cuda::GpuMachine, kDType, Shape, kGeneral>(machine, params).Run();
}

template <DType kDType, class Shape, bool kGeneral>
const char* LaunchForward(const heed::cuda::Launch& launch, const ForwardParams& params) {
  return heed::cuda::LaunchKernel(launch, Shape::kThreads, Shape::kSharedBytes, &ForwardKernel<kDType, Shape, kGeneral>, params);
}

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_FORWARD_KERNEL_H_
