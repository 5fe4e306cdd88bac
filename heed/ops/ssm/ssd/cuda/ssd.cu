// The computations of SSD beside its recurrence, compiled for GPUs.
#include "heed/cuda/block_kernel.h"
#include "heed/ops/ssm/ssd/cuda/element_blocks_internal.h"

namespace heed::ssd::cuda {

using heed::cuda::LaunchBlocks;

extern const Launches kLaunches = {.steps = &LaunchBlocks<kThreads, StepBlock>,
                                   .gate = &LaunchBlocks<kThreads, GateBlock>,
                                   .finish = &LaunchBlocks<kThreads, FinishBlock>,
                                   .clear = &LaunchBlocks<kThreads, ClearBlock>,
                                   .total = &LaunchBlocks<kThreads, TotalBlock>};

}  // namespace heed::ssd::cuda
