// Walks whose channels decay together, if at all.
#include "heed/engines/recurrence/cuda/walk_kernel.h"

namespace heed::recurrence::cuda {

const char* LaunchPlainWalk(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return LaunchWalk<false>(launch, params);
}

}  // namespace heed::recurrence::cuda
