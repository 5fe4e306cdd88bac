// The kernels of selective scans and their launches.
#include "heed/cuda/block_kernel.h"
#include "heed/engines/scan/cuda/launches.h"

namespace heed::scan::cuda {
namespace {

using heed::cuda::GpuMachine;
using heed::cuda::LaunchBlock;

const char* Forward(const heed::cuda::Launch& launch, const ScanParams& params) {
  return WithShape(params.states, [&](auto shape) {
    using Shape = decltype(shape);
    return LaunchBlock<ForwardBlock<GpuMachine, Shape>, Shape::kThreads, 768 / Shape::kThreads>(
        launch, Shape::kForwardBytes, params);
  });
}

const char* Backward(const heed::cuda::Launch& launch, const GradientParams& params) {
  return WithShape(params.scan.states, [&](auto shape) {
    using Shape = decltype(shape);
    return LaunchBlock<BackwardBlock<GpuMachine, Shape>, Shape::kThreads, 512 / Shape::kThreads>(
        launch, Shape::kBackwardBytes, params);
  });
}

template <template <class> class Block, class Params>
const char* Sums(const heed::cuda::Launch& launch, const Params& params) {
  return LaunchBlock<Block<GpuMachine>, kSumThreads>(launch, 0, params);
}

}  // namespace

extern const Launches kLaunches = {.forward = &Forward,
                                   .backward = &Backward,
                                   .token_sums = &Sums<TokenSumBlock, TokenSumParams>,
                                   .constant_sums = &Sums<ConstantSumBlock, ConstantSumParams>};

}  // namespace heed::scan::cuda
