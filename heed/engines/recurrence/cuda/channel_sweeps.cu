// Sweeps whose channels decay each by itself, or are mapped.
#include "heed/engines/recurrence/cuda/sweep_kernel.h"

namespace heed::recurrence::cuda {

const char* LaunchChannelSweep(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return LaunchSweep<true>(launch, params);
}

}  // namespace heed::recurrence::cuda
