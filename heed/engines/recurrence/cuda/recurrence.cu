// The kernels of recurrences besides walks, compiled for GPUs, and the launches of all.
#include "heed/engines/recurrence/cuda/walk_kernel.h"

namespace heed::recurrence::cuda {
namespace {

const char* Walk(const heed::cuda::Launch& launch, bool delta, const ChunkParams& params) {
  return IsByChannel(params) ? LaunchWalkOfChannels(launch, delta, params) : LaunchPlainWalk(launch, delta, params);
}

template <class Block, class Params>
__global__ void __launch_bounds__(kGradientThreads) GradientKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  Block(machine, params).Run();
}

const char* Gather(const heed::cuda::Launch& launch, const GatherParams& params) {
  return heed::cuda::LaunchKernel(launch, kGradientThreads, 0,
                                  &GradientKernel<GatherBlock<heed::cuda::GpuMachine>, GatherParams>, params);
}
const char* DecayGradients(const heed::cuda::Launch& launch, const DecayGradientParams& params) {
  using Block = DecayGradientBlock<heed::cuda::GpuMachine>;
  return heed::cuda::LaunchKernel(launch, kGradientThreads, Block::kSharedBytes, &GradientKernel<Block, DecayGradientParams>,
                                  params);
}

const char* TokenSums(const heed::cuda::Launch& launch, const TokenSumParams& params) {
  using Block = TokenSumBlock<heed::cuda::GpuMachine>;
  return heed::cuda::LaunchKernel(launch, kGradientThreads, Block::kSharedBytes, &GradientKernel<Block, TokenSumParams>, params);
}

}  // namespace

extern const Launches kLaunches = {
    .walk = &Walk, .gather = &Gather, .decay_gradients = &DecayGradients, .token_sums = &TokenSums};

}  // namespace heed::recurrence::cuda
