// What SSD computes beside its recurrence, compiled for GPUs.
#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/ops/ssm/ssd/cuda/element_blocks_internal.h"

namespace heed::ssd::cuda {
namespace {

template <class Block, class Params>
__global__ void __launch_bounds__(kThreads) ElementKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  Block(machine, params).Run();
}

template <template <class> class Block, class Params>
const char* Run(const heed::cuda::Launch& launch, const Params& params) {
  using OnGpu = Block<heed::cuda::GpuMachine>;
  return heed::cuda::LaunchKernel(launch, kThreads, OnGpu::kSharedBytes, &ElementKernel<OnGpu, Params>, params);
}

}  // namespace

extern const Launches kLaunches = {
    .steps = &Run<StepBlock>, .gate = &Run<GateBlock>, .finish = &Run<FinishBlock>, .clear = &Run<ClearBlock>, .total = &Run<TotalBlock>};

}  // namespace heed::ssd::cuda
