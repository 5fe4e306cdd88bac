// The kernels of recurrences besides walks, compiled for GPUs, and the launches of all.
#include "heed/engines/recurrence/cuda/walk_kernel.h"

namespace heed::recurrence::cuda {
namespace {

const char* Walk(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return IsByChannel(params) ? LaunchWalkOfChannels(launch, params) : LaunchPlainWalk(launch, params);
}

template <class Block, class Params>
__global__ void __launch_bounds__(kGradientThreads) GradientKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  Block(machine, params).Run();
}

template <template <class> class Block, class Params>
const char* Run(const heed::cuda::Launch& launch, const Params& params) {
  using OnGpu = Block<heed::cuda::GpuMachine>;
  return heed::cuda::LaunchKernel(launch, kGradientThreads, OnGpu::kSharedBytes, &GradientKernel<OnGpu, Params>, params);
}

}  // namespace

extern const Launches kLaunches = {.walk = &Walk,
                                   .gather = &Run<GatherBlock>,
                                   .decay_gradients = &Run<DecayGradientBlock>,
                                   .products = &Run<ProductBlock>,
                                   .dots = &Run<DotBlock>,
                                   .denormalize = &Run<DenormalizeBlock>,
                                   .copy_states = &Run<StateCopyBlock>,
                                   .token_sums = &Run<TokenSumBlock>};

}  // namespace heed::recurrence::cuda
