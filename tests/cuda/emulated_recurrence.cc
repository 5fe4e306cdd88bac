// Recurrences on the emulated device.
#include <cstddef>

#include "heed/engines/recurrence/cuda/launches.h"
#include "tests/cuda/emulated_engines.h"
#include "tests/cuda/emulated_machine.h"

namespace heed::cuda {
namespace {

using namespace recurrence::cuda;  // NOLINT: what it launches

template <bool kByChannel>
const char* SweepOf(const Launch& launch, const ChunkParams& params) {
  return WithKernel<kByChannel>(params, [&](auto shape, auto form) -> const char* {
    using Shape = decltype(shape);
    RunEmulated({.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]},
                 .threads = kChunkThreads,
                 .shared_bytes = static_cast<size_t>(SharedBytesOf<Shape>(params)),
                 .seed = EmulatedSeed()},
                [&](EmulatedMachine& machine) {
                  ChunkBlock<EmulatedMachine, Shape::kChannels, kByChannel, form.value>(machine, params).Run();
                });
    return nullptr;
  });
}

const char* Sweep(const Launch& launch, const ChunkParams& params) {
  return IsByChannel(params) ? SweepOf<true>(launch, params) : SweepOf<false>(launch, params);
}

}  // namespace

const recurrence::cuda::Launches& EmulatedRecurrence() {
  static constexpr Launches kLaunches = {.sweep = &Sweep,
                                         .gather = &RunBlocks<kGradientThreads, GatherBlock>,
                                         .decay_gradients = &RunBlocks<kGradientThreads, DecayGradientBlock>,
                                         .products = &RunBlocks<kGradientThreads, ProductBlock>,
                                         .dots = &RunBlocks<kGradientThreads, DotBlock>,
                                         .denormalize = &RunBlocks<kGradientThreads, DenormalizeBlock>,
                                         .copy_states = &RunBlocks<kGradientThreads, StateCopyBlock>,
                                         .token_sums = &RunBlocks<kGradientThreads, TokenSumBlock>,
                                         .gates = &RunBlocks<kGateThreads, GateBlock>,
                                         .multiply = &RunBlocks<kGradientThreads, MultiplyBlock>,
                                         .split = &RunBlocks<kGradientThreads, SplitBlock>,
                                         .bonus_weights = &RunBlocks<kGradientThreads, BonusWeightBlock>,
                                         .bonus_gradients = &RunBlocks<kGradientThreads, BonusGradientBlock>};
  return kLaunches;
}

}  // namespace heed::cuda
