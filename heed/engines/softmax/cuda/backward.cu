// The backward kernels of attention and their launches.
#include "heed/cuda/block_kernel.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {
namespace {

using heed::cuda::GpuMachine;
using heed::cuda::Launch;

template <template <class, class, bool> class Block>
const char* LaunchGradients(const Launch& launch, const BackwardParams& params) {
  return WithBackwardKernel(params.forward, [&](auto shape, auto general) {
    using Shape = decltype(shape);
    using Of = Block<GpuMachine, Shape, general.value>;
    return heed::cuda::LaunchBlock<Of, Shape::kThreads, Shape::kBlocks>(launch, Shape::kSharedBytes, params);
  });
}

}  // namespace

const char* LaunchTerms(const Launch& launch, const BackwardParams& params) {
  return heed::cuda::LaunchBlock<TermsBlock<GpuMachine>, kTermsThreads>(launch, 0, params);
}
const char* LaunchKeyGradients(const Launch& launch, const BackwardParams& params) {
  return LaunchGradients<KeyGradientsBlock>(launch, params);
}
const char* LaunchQueryGradients(const Launch& launch, const BackwardParams& params) {
  return LaunchGradients<QueryGradientsBlock>(launch, params);
}
const char* LaunchBiasGradients(const Launch& launch, const BiasGradientParams& params) {
  const ForwardParams& of = params.backward.forward;
  return WithBackwardShape(of.dtype, of.depth, of.value_depth, [&](auto shape) {
    using Block = BiasGradientsBlock<GpuMachine, decltype(shape)>;
    return heed::cuda::LaunchBlock<Block, decltype(shape)::kThreads>(launch, Block::kSharedBytes, params);
  });
}
const char* LaunchHeadSums(const Launch& launch, const HeadSumsParams& params) {
  return heed::cuda::LaunchBlocks<HeadSumsBlock<GpuMachine>::kThreads, HeadSumsBlock>(launch, params);
}

}  // namespace heed::softmax::cuda
