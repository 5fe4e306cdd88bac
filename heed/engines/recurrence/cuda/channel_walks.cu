// Walks whose channels decay each by itself, or are mapped.
#include "heed/engines/recurrence/cuda/walk_kernel.h"

namespace heed::recurrence::cuda {

const char* LaunchWalkOfChannels(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return LaunchWalk<true>(launch, params);
}

}  // namespace heed::recurrence::cuda
