// The kernels of sweeps whose channels share a decay or have none.
#include "heed/engines/recurrence/cuda/sweep_kernel.h"

namespace heed::recurrence::cuda {

const char* LaunchPlainSweep(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return LaunchSweep<false>(launch, params);
}

}  // namespace heed::recurrence::cuda
