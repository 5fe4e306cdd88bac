// The forward kernels of few rows, and the one that combines parts, compiled for GPUs, and their launches.
#include "heed/engines/softmax/cuda/forward_kernel.h"

namespace heed::softmax::cuda {
namespace {

__global__ void __launch_bounds__(kCombineThreads) CombineKernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  CombineBlock(machine, params).Run();
}

}  // namespace

const char* LaunchFewRows(const heed::cuda::Launch& launch, const ForwardParams& params) {
  return WithFewRowsKernel(params, [&](auto shape, auto of) {
    return LaunchForward<of.value, decltype(shape), true>(launch, params);
  });
}
const char* LaunchCombine(const heed::cuda::Launch& launch, const ForwardParams& params) {
  return heed::cuda::LaunchKernel(launch, kCombineThreads, 0, &CombineKernel, params);
}

}  // namespace heed::softmax::cuda
