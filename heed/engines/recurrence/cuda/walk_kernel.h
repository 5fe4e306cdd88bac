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

template <int kKeys, bool kByChannel, Form kForm>
__global__ void __launch_bounds__(kChunkThreads, BlocksFor(kKeys, !kByChannel && kForm == Form::kPlain))
    WalkKernel(const __grid_constant__ ChunkParams params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  ChunkBlock<heed::cuda::GpuMachine, DType::kBF16, kKeys, kByChannel, kForm>(machine, params).Run();
}

template <bool kByChannel>
const char* LaunchWalk(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return WithKernel<kByChannel>(params, [&](auto shape, auto form) {
    using Shape = decltype(shape);
    return heed::cuda::LaunchKernel(launch, kChunkThreads, SharedBytesOf<Shape>(params),
                                    &WalkKernel<Shape::kChannels, kByChannel, form.value>, params);
  });
}

// Each in a file of its own, as compilers take minutes for them.
const char* LaunchPlainWalk(const heed::cuda::Launch& launch, const ChunkParams& params);
const char* LaunchWalkOfChannels(const heed::cuda::Launch& launch, const ChunkParams& params);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_WALK_KERNEL_H_
