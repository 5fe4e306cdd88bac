// SSD besides its recurrence on the emulated device.
#include "heed/ops/ssm/ssd/cuda/element_blocks_internal.h"
#include "tests/cuda/emulated_engines.h"
#include "tests/cuda/emulated_machine.h"

namespace heed::cuda {

using namespace ssd::cuda;  // NOLINT: what it launches

const ssd::cuda::Launches& EmulatedSsd() {
  static constexpr Launches kLaunches = {.steps = &RunBlocks<kThreads, StepBlock>,
                                         .gate = &RunBlocks<kThreads, GateBlock>,
                                         .finish = &RunBlocks<kThreads, FinishBlock>,
                                         .clear = &RunBlocks<kThreads, ClearBlock>,
                                         .total = &RunBlocks<kThreads, TotalBlock>};
  return kLaunches;
}

}  // namespace heed::cuda
