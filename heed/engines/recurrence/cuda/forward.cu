// The forward kernels of recurrences, compiled for GPUs, and their launches.
#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/engines/recurrence/cuda/launches.h"

namespace heed::recurrence::cuda {
namespace {

static_assert(sizeof(ChunkParams) <= 32764, "a launch takes no more arguments");

template <DType kDType, int kKeys, bool kByChannel, bool kDelta>
__global__ void __launch_bounds__(kChunkThreads) ChunkKernel(const __grid_constant__ ChunkParams params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  ChunkBlock<heed::cuda::GpuMachine, kDType, kKeys, kByChannel, kDelta>(machine, params).Run();
}

const char* Forward(const heed::cuda::Launch& launch, DType dtype, bool delta, const ChunkParams& params) {
  return WithKernel(dtype, delta, params, [&](auto shape, auto of, auto of_delta) {
    using Shape = decltype(shape);
    return heed::cuda::LaunchKernel(launch, kChunkThreads, Shape::SharedBytes(of_delta.value, params.read_key.data != nullptr),
                                    &ChunkKernel<of.value, Shape::kChannels, Shape::kOfChannels, of_delta.value>, params);
  });
}

}  // namespace

extern const Launches kLaunches = {.forward = &Forward};

}  // namespace heed::recurrence::cuda
