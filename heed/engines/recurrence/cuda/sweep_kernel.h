// The launch of a sweep, for the files that compile its kernels.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_SWEEP_KERNEL_H_
#define HEED_ENGINES_RECURRENCE_CUDA_SWEEP_KERNEL_H_

#include "heed/cuda/block_kernel.h"
#include "heed/engines/recurrence/cuda/launches.h"

namespace heed::recurrence::cuda {

// Blocks per SM, which limits registers.
constexpr int BlocksFor(int keys, bool plain) { return keys > 64 ? 2 : plain ? 4 : 3; }

template <bool kByChannel>
const char* LaunchSweep(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return WithKernel<kByChannel>(params, [&](auto shape, auto form) {
    using Shape = decltype(shape);
    using Block = ChunkBlock<heed::cuda::GpuMachine, Shape::kChannels, kByChannel, form.value>;
    constexpr int kBlocks = BlocksFor(Shape::kChannels, !kByChannel && form.value == Form::kPlain);
    return heed::cuda::LaunchBlock<Block, kChunkThreads, kBlocks>(launch, SharedBytesOf<Shape>(params), params);
  });
}

// Each is in a file of its own, because it takes minutes to compile.
const char* LaunchPlainSweep(const heed::cuda::Launch& launch, const ChunkParams& params);
const char* LaunchChannelSweep(const heed::cuda::Launch& launch, const ChunkParams& params);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_SWEEP_KERNEL_H_
