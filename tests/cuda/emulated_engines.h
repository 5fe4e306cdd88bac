// Launches of the engines on the emulated device. Each is in a file of its own, because it takes minutes to compile.
#ifndef HEED_TESTS_CUDA_EMULATED_ENGINES_H_
#define HEED_TESTS_CUDA_EMULATED_ENGINES_H_

#include <cstddef>
#include <cstdint>

#include "heed/cuda/library.h"
#include "tests/cuda/emulated_machine.h"

namespace heed::cuda {

uint64_t EmulatedSeed();  // set by SetEmulatedSeed()

const softmax::cuda::Launches& EmulatedSoftmax();
const recurrence::cuda::Launches& EmulatedRecurrence();
const ssd::cuda::Launches& EmulatedSsd();
const scan::cuda::Launches& EmulatedScan();

// The counterpart of LaunchBlocks() in heed/cuda/block_kernel.h.
template <int kThreads, template <class> class Block, class Params>
const char* RunBlocks(const Launch& launch, const Params& params) {
  RunEmulated({.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]},
               .threads = kThreads,
               .shared_bytes = static_cast<size_t>(Block<EmulatedMachine>::kSharedBytes),
               .seed = EmulatedSeed()},
              [&](EmulatedMachine& machine) { Block<EmulatedMachine>(machine, params).Run(); });
  return nullptr;
}

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_EMULATED_ENGINES_H_
