// Launches of engines on the emulated device, each in a file of its own, as compilers take minutes for them.
#ifndef HEED_TESTS_CUDA_EMULATED_ENGINES_H_
#define HEED_TESTS_CUDA_EMULATED_ENGINES_H_

#include <cstdint>

#include "heed/cuda/library.h"

namespace heed::cuda {

uint64_t EmulatedSeed();  // SetEmulatedSeed()'s

const scan::cuda::Launches& EmulatedScan();

}  // namespace heed::cuda

#endif  // HEED_TESTS_CUDA_EMULATED_ENGINES_H_
