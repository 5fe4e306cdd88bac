// The kernels of selective scans, compiled for GPUs, and their launches.
#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/engines/scan/cuda/launches.h"

namespace heed::scan::cuda {
namespace {

using heed::cuda::GpuMachine;

// Blocks of a multiprocessor at a time that registers are to suffice for.
template <class Shape>
inline constexpr int kBlocksAtATime = 768 / Shape::kThreads;

template <class Block, class Params, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) BlockKernel(const __grid_constant__ Params params) {
  static_assert(sizeof(Params) <= 32764, "a launch takes no more arguments");
  extern __shared__ __align__(128) char shared[];
  GpuMachine machine(shared);
  Block(machine, params).Run();
}

const char* Forward(const heed::cuda::Launch& launch, const ScanParams& params) {
  return WithShape(params.states, [&](auto shape) {
    using Shape = decltype(shape);
    using Block = ForwardBlock<GpuMachine, Shape>;
    return heed::cuda::LaunchKernel(launch, Shape::kThreads, Shape::kForwardBytes,
                                    &BlockKernel<Block, ScanParams, Shape::kThreads, kBlocksAtATime<Shape>>, params);
  });
}

const char* Backward(const heed::cuda::Launch& launch, const GradientParams& params) {
  return WithShape(params.scan.states, [&](auto shape) {
    using Shape = decltype(shape);
    using Block = BackwardBlock<GpuMachine, Shape>;
    return heed::cuda::LaunchKernel(launch, Shape::kThreads, Shape::kBackwardBytes,
                                    &BlockKernel<Block, GradientParams, Shape::kThreads, 512 / Shape::kThreads>, params);
  });
}

template <template <class> class Block, class Params>
const char* Sums(const heed::cuda::Launch& launch, const Params& params) {
  return heed::cuda::LaunchKernel(launch, kSumThreads, 0, &BlockKernel<Block<GpuMachine>, Params, kSumThreads, 1>, params);
}

}  // namespace

extern const Launches kLaunches = {.forward = &Forward,
                                   .backward = &Backward,
                                   .token_sums = &Sums<TokenSumBlock, TokenSumParams>,
                                   .constant_sums = &Sums<ConstantSumBlock, ConstantSumParams>};

}  // namespace heed::scan::cuda
