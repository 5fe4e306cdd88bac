// The forward kernels, compiled for GPUs, and their launches.
#include "heed/cuda/gpu_machine.h"
#include "heed/cuda/launch.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {

// backward.cu
const char* LaunchTerms(const heed::cuda::Launch& launch, const BackwardParams& params);
const char* LaunchKeyGradients(const heed::cuda::Launch& launch, const BackwardParams& params);
const char* LaunchQueryGradients(const heed::cuda::Launch& launch, const BackwardParams& params);

namespace {

static_assert(sizeof(ForwardParams) <= 32764, "a launch takes no more arguments");

template <DType kDType, int kDepth, int kValueDepth, bool kGeneral>
__global__ void __launch_bounds__(ForwardShape<kDepth, kValueDepth>::kThreads)
    ForwardKernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) char shared[];
  heed::cuda::GpuMachine machine(shared);
  ForwardBlock<heed::cuda::GpuMachine, kDType, kDepth, kValueDepth, kGeneral>(machine, params).Run();
}

const char* Forward(const heed::cuda::Launch& launch, DType dtype, const ForwardParams& params) {
  return WithKernel(dtype, params, [&](auto shape, auto of, auto general) {
    using Shape = decltype(shape);
    return heed::cuda::LaunchKernel(launch, Shape::kThreads, Shape::kSharedBytes,
                                    &ForwardKernel<of.value, Shape::kChannels, Shape::kValueChannels, general.value>, params);
  });
}

}  // namespace

extern const Launches kLaunches = {
    .forward = &Forward, .terms = &LaunchTerms, .key_gradients = &LaunchKeyGradients, .query_gradients = &LaunchQueryGradients};

}  // namespace heed::softmax::cuda
