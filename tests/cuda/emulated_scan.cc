// Selective scans on the emulated device.
#include <cstddef>

#include "heed/engines/scan/cuda/launches.h"
#include "tests/cuda/emulated_engines.h"
#include "tests/cuda/emulated_machine.h"

namespace heed::cuda {
namespace {

using namespace scan::cuda;  // NOLINT: what it launches

template <class Block, class Params>
const char* Run(const Launch& launch, int threads, size_t shared_bytes, const Params& params) {
  RunEmulated({.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]},
               .threads = threads,
               .shared_bytes = shared_bytes,
               .seed = EmulatedSeed()},
              [&](EmulatedMachine& machine) { Block(machine, params).Run(); });
  return nullptr;
}

const char* Forward(const Launch& launch, const ScanParams& params) {
  return WithShape(params.states, [&](auto shape) {
    return Run<ForwardBlock<EmulatedMachine, decltype(shape)>>(launch, shape.kThreads, shape.kForwardBytes, params);
  });
}
const char* Backward(const Launch& launch, const GradientParams& params) {
  return WithShape(params.scan.states, [&](auto shape) {
    return Run<BackwardBlock<EmulatedMachine, decltype(shape)>>(launch, shape.kThreads, shape.kBackwardBytes, params);
  });
}
template <template <class> class Block, class Params>
const char* Sums(const Launch& launch, const Params& params) {
  return Run<Block<EmulatedMachine>>(launch, kSumThreads, 0, params);
}

}  // namespace

const scan::cuda::Launches& EmulatedScan() {
  static constexpr Launches kLaunches = {.forward = &Forward,
                                         .backward = &Backward,
                                         .token_sums = &Sums<TokenSumBlock, TokenSumParams>,
                                         .constant_sums = &Sums<ConstantSumBlock, ConstantSumParams>};
  return kLaunches;
}

}  // namespace heed::cuda
