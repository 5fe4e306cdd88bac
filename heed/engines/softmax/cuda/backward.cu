// The backward kernels, compiled for GPUs, and their launches.
#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {
namespace {

using heed::cuda::GpuMachine;
using heed::cuda::Launch;

static_assert(sizeof(BackwardParams) <= 32764, "a launch takes no more arguments");

template <class Block>
__global__ void __launch_bounds__(kBackwardThreads) BackwardKernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) char shared[];
  GpuMachine machine(shared);
  Block(machine, params).Run();
}

template <template <class, DType, int, int, bool> class Block>
const char* LaunchBlocks(const Launch& launch, const BackwardParams& params) {
  return WithBackwardKernel(params.forward, [&](auto shape, auto general) {
    using Shape = decltype(shape);
    using Of = Block<GpuMachine, DType::kBF16, Shape::kChannels, Shape::kValueChannels, general.value>;
    return heed::cuda::LaunchKernel(launch, kBackwardThreads, Shape::kSharedBytes, &BackwardKernel<Of>, params);
  });
}

}  // namespace

const char* LaunchTerms(const Launch& launch, const BackwardParams& params) {
  return heed::cuda::LaunchKernel(launch, kBackwardThreads, 0, &BackwardKernel<TermsBlock<GpuMachine, DType::kBF16>>, params);
}
const char* LaunchKeyGradients(const Launch& launch, const BackwardParams& params) {
  return LaunchBlocks<KeyGradientsBlock>(launch, params);
}
const char* LaunchQueryGradients(const Launch& launch, const BackwardParams& params) {
  return LaunchBlocks<QueryGradientsBlock>(launch, params);
}

}  // namespace heed::softmax::cuda
