// The kernels of sweeps with decays per channel or feature maps.
#include "heed/engines/recurrence/cuda/sweep_kernel.h"

namespace heed::recurrence::cuda {

const char* LaunchChannelSweep(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return LaunchSweep<true>(launch, params);
}

}  // namespace heed::recurrence::cuda
