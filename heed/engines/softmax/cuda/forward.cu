// The forward kernels of attention, and the table of the engine's launches.
#include "heed/engines/softmax/cuda/forward_kernel.h"

namespace heed::softmax::cuda {

#if defined(HEED_WITH_HOPPER)
extern const BlockLaunches kWgmmaLaunches;  // attention_hopper.cu
#else
constexpr BlockLaunches kWgmmaLaunches = {};
#endif
// small_m.cu
const char* LaunchSmallM(const heed::cuda::Launch& launch, const ForwardParams& params);
const char* LaunchCombine(const heed::cuda::Launch& launch, const ForwardParams& params);
// backward.cu
const char* LaunchTerms(const heed::cuda::Launch& launch, const BackwardParams& params);
const char* LaunchKeyGradients(const heed::cuda::Launch& launch, const BackwardParams& params);
const char* LaunchQueryGradients(const heed::cuda::Launch& launch, const BackwardParams& params);
const char* LaunchBiasGradients(const heed::cuda::Launch& launch, const BiasGradientParams& params);
const char* LaunchHeadSums(const heed::cuda::Launch& launch, const HeadSumsParams& params);

namespace {

const char* Forward(const heed::cuda::Launch& launch, const ForwardParams& params) {
  return WithKernel(
      params, [&](auto shape, auto general) { return LaunchForward<decltype(shape), general.value>(launch, params); });
}

}  // namespace

extern const Launches kLaunches = {
    .mma_sync = {.forward = &Forward, .key_gradients = &LaunchKeyGradients, .query_gradients = &LaunchQueryGradients},
    .wgmma = kWgmmaLaunches,
    .small_m = &LaunchSmallM,
    .combine = &LaunchCombine,
    .terms = &LaunchTerms,
    .bias_gradients = &LaunchBiasGradients,
    .head_sums = &LaunchHeadSums};

}  // namespace heed::softmax::cuda
