// The kernels of recurrences besides sweeps, and the table of the engine's launches.
#include "heed/engines/recurrence/cuda/sweep_kernel.h"

namespace heed::recurrence::cuda {
namespace {

using heed::cuda::LaunchBlocks;

const char* Sweep(const heed::cuda::Launch& launch, const ChunkParams& params) {
  return IsByChannel(params) ? LaunchChannelSweep(launch, params) : LaunchPlainSweep(launch, params);
}

}  // namespace

extern const Launches kLaunches = {.sweep = &Sweep,
                                   .gather = &LaunchBlocks<kGradientThreads, GatherBlock>,
                                   .decay_gradients = &LaunchBlocks<kGradientThreads, DecayGradientBlock>,
                                   .products = &LaunchBlocks<kGradientThreads, ProductBlock>,
                                   .dots = &LaunchBlocks<kGradientThreads, DotBlock>,
                                   .denormalize = &LaunchBlocks<kGradientThreads, DenormalizeBlock>,
                                   .copy_states = &LaunchBlocks<kGradientThreads, StateCopyBlock>,
                                   .token_sums = &LaunchBlocks<kGradientThreads, TokenSumBlock>,
                                   .gates = &LaunchBlocks<kGateThreads, GateBlock>,
                                   .multiply = &LaunchBlocks<kGradientThreads, MultiplyBlock>,
                                   .split = &LaunchBlocks<kGradientThreads, SplitBlock>,
                                   .bonus_weights = &LaunchBlocks<kGradientThreads, BonusWeightBlock>,
                                   .bonus_gradients = &LaunchBlocks<kGradientThreads, BonusGradientBlock>};

}  // namespace heed::recurrence::cuda
