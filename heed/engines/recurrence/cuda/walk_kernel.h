// A walk as a kernel of GPUs, for the files that compile them.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_WALK_KERNEL_H_
#define HEED_ENGINES_RECURRENCE_CUDA_WALK_KERNEL_H_

#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/engines/recurrence/cuda/launches.h"

namespace heed::recurrence::cuda {

static_assert(sizeof(ChunkParams) <= 32764, "a launch takes no more arguments");

// Blocks of a multiprocessor at a time that registers are to suffice for.
constexpr int BlocksFor(int keys, bool plain) { return keys > 64 ? 2 : plain ? 4 : 3; }

template <int kKeys, bool kByChannel, bool kDelta, bool kGeneral>
__global__ void __launch_bounds__(kChunkThreads, BlocksFor(kKeys, !kByChannel && !kDelta && !kGeneral))
    WalkKernel(const __grid_constant__ ChunkParams params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  ChunkBlock<heed::cuda::GpuMachine, DType::kBF16, kKeys, kByChannel, kDelta, kGeneral>(machine, params).Run();
}

template <bool kByChannel>
const char* LaunchWalk(const heed::cuda::Launch& launch, bool delta, const ChunkParams& params) {
  return WithKernel<kByChannel>(delta, params, [&](auto shape, auto of_delta, auto general) {
    using Shape = decltype(shape);
    return heed::cuda::LaunchKernel(launch, kChunkThreads, SharedBytesOf<Shape>(of_delta.value, params),
                                    &WalkKernel<Shape::kChannels, kByChannel, of_delta.value, general.value>, params);
  });
}

// Each in a file of its own, as compilers take minutes for them.
const char* LaunchPlainWalk(const heed::cuda::Launch& launch, bool delta, const ChunkParams& params);
const char* LaunchWalkOfChannels(const heed::cuda::Launch& launch, bool delta, const ChunkParams& params);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_WALK_KERNEL_H_
