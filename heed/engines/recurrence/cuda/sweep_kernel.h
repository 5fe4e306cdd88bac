// A sweep as a kernel of GPUs, for the files that compile them.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_SWEEP_KERNEL_H_
#define HEED_ENGINES_RECURRENCE_CUDA_SWEEP_KERNEL_H_

#include "heed/cuda/block_kernel.h"
#include "heed/engines/recurrence/cuda/launches.h"

namespace heed::recurrence::cuda {

// Blocks of a SM at a time that registers are to suffice for.
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

// Each in a file of its own, as compilers take minutes for them.
const char* LaunchPlainSweep(const heed::cuda::Launch& launch, const ChunkParams& params);
const char* LaunchChannelSweep(const heed::cuda::Launch& launch, const ChunkParams& params);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_SWEEP_KERNEL_H_
