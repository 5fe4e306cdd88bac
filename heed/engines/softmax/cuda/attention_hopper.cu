// The WGMMA kernels of attention, compiled for Hopper, and their launches.
#include "heed/cuda/hopper_machine.h"
#include "heed/engines/softmax/cuda/forward_kernel.h"

namespace heed::softmax::cuda {
namespace {

using heed::cuda::HopperMachine;
using heed::cuda::Launch;

template <template <class, class, bool> class Block>
const char* LaunchGradients(const Launch& launch, const BackwardParams& params) {
  return WithWgmmaKernel<BackwardWgmmaShape>(params.forward, [&](auto shape, auto general) {
    using Shape = decltype(shape);
    using Of = Block<HopperMachine, Shape, general.value>;
    return heed::cuda::LaunchBlock<Of, Shape::kThreads, Shape::kBlocks, HopperMachine>(launch, Shape::kSharedBytes,
                                                                                       params);
  });
}

const char* Forward(const Launch& launch, const ForwardParams& params) {
  return WithWgmmaKernel<WgmmaShape>(params, [&](auto shape, auto general) {
    return LaunchForward<decltype(shape), general.value, HopperMachine>(launch, params);
  });
}

}  // namespace

extern constexpr BlockLaunches kWgmmaLaunches = {.forward = &Forward,
                                                 .key_gradients = &LaunchGradients<KeyGradientsBlock>,
                                                 .query_gradients = &LaunchGradients<QueryGradientsBlock>};

}  // namespace heed::softmax::cuda
