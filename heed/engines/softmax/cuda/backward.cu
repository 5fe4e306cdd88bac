// The backward kernels, compiled for GPUs, and their launches.
#include "heed/cuda/block_kernel.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {
namespace {

using heed::cuda::GpuMachine;
using heed::cuda::Launch;

template <template <class, DType, int, int, bool> class Block>
const char* LaunchGradients(const Launch& launch, const BackwardParams& params) {
  return WithBackwardKernel(params.forward, [&](auto shape, auto general) {
    using Shape = decltype(shape);
    using Of = Block<GpuMachine, DType::kBF16, Shape::kChannels, Shape::kValueChannels, general.value>;
    return heed::cuda::LaunchBlock<Of, kBackwardThreads>(launch, Shape::kSharedBytes, params);
  });
}

}  // namespace

const char* LaunchTerms(const Launch& launch, const BackwardParams& params) {
  return heed::cuda::LaunchBlock<TermsBlock<GpuMachine, DType::kBF16>, kBackwardThreads>(launch, 0, params);
}
const char* LaunchKeyGradients(const Launch& launch, const BackwardParams& params) {
  return LaunchGradients<KeyGradientsBlock>(launch, params);
}
const char* LaunchQueryGradients(const Launch& launch, const BackwardParams& params) {
  return LaunchGradients<QueryGradientsBlock>(launch, params);
}

}  // namespace heed::softmax::cuda
