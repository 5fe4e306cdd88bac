// Attention on the emulated device.
#include <cstddef>

#include "heed/engines/softmax/cuda/forward_shapes.h"
#include "tests/cuda/emulated_engines.h"
#include "tests/cuda/emulated_machine.h"

namespace heed::cuda {
namespace {

using namespace softmax::cuda;  // NOLINT: what it launches

template <class Shape, bool kGeneral>
const char* RunForward(const Launch& launch, const ForwardParams& params) {
  RunEmulated({.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]},
               .threads = Shape::kThreads,
               .shared_bytes = Shape::kSharedBytes,
               .seed = EmulatedSeed()},
              [&](EmulatedMachine& machine) { ForwardBlock<EmulatedMachine, Shape, kGeneral>(machine, params).Run(); });
  return nullptr;
}
const char* Forward(const Launch& launch, const ForwardParams& params) {
  return WithKernel(
      params, [&](auto shape, auto general) { return RunForward<decltype(shape), general.value>(launch, params); });
}
const char* ForwardWgmma(const Launch& launch, const ForwardParams& params) {
  return WithWgmmaKernel<WgmmaShape>(
      params, [&](auto shape, auto general) { return RunForward<decltype(shape), general.value>(launch, params); });
}
const char* SmallM(const Launch& launch, const ForwardParams& params) {
  return WithSmallMShape(params.dtype, params.depth, params.value_depth,
                         [&](auto shape) { return RunForward<decltype(shape), true>(launch, params); });
}
const char* Combine(const Launch& launch, const ForwardParams& params) {
  RunEmulated({.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]},
               .threads = kCombineThreads,
               .seed = EmulatedSeed()},
              [&](EmulatedMachine& machine) { CombineBlock(machine, params).Run(); });
  return nullptr;
}

template <class Kernel>
const char* RunBackward(const Launch& launch, int threads, size_t shared_bytes, const Kernel& kernel) {
  RunEmulated({.blocks = {launch.blocks[0], launch.blocks[1], launch.blocks[2]},
               .threads = threads,
               .shared_bytes = shared_bytes,
               .seed = EmulatedSeed()},
              kernel);
  return nullptr;
}

const char* Terms(const Launch& launch, const BackwardParams& params) {
  return RunBackward(launch, kTermsThreads, 0, [&](EmulatedMachine& machine) { TermsBlock(machine, params).Run(); });
}

template <template <class, class, bool> class Block, class Shape, bool kGeneral>
const char* RunGradients(const Launch& launch, const BackwardParams& params) {
  return RunBackward(launch, Shape::kThreads, Shape::kSharedBytes,
                     [&](EmulatedMachine& machine) { Block<EmulatedMachine, Shape, kGeneral>(machine, params).Run(); });
}
template <template <class, class, bool> class Block>
const char* GradientsBy(const Launch& launch, const BackwardParams& params) {
  return WithBackwardKernel(params.forward, [&](auto shape, auto general) {
    return RunGradients<Block, decltype(shape), general.value>(launch, params);
  });
}
template <template <class, class, bool> class Block>
const char* WgmmaGradientsBy(const Launch& launch, const BackwardParams& params) {
  return WithWgmmaKernel<BackwardWgmmaShape>(params.forward, [&](auto shape, auto general) {
    return RunGradients<Block, decltype(shape), general.value>(launch, params);
  });
}
const char* BiasGradients(const Launch& launch, const BiasGradientParams& params) {
  const ForwardParams& of = params.backward.forward;
  return WithBackwardShape(of.dtype, of.depth, of.value_depth, [&](auto shape) {
    using Block = BiasGradientsBlock<EmulatedMachine, decltype(shape)>;
    return RunBackward(launch, decltype(shape)::kThreads, Block::kSharedBytes,
                       [&](EmulatedMachine& machine) { Block(machine, params).Run(); });
  });
}

}  // namespace

const softmax::cuda::Launches& EmulatedSoftmax() {
  static constexpr Launches kLaunches = {
      .mma_sync = {.forward = &Forward,
                   .key_gradients = &GradientsBy<KeyGradientsBlock>,
                   .query_gradients = &GradientsBy<QueryGradientsBlock>},
      .wgmma = {.forward = &ForwardWgmma,
                .key_gradients = &WgmmaGradientsBy<KeyGradientsBlock>,
                .query_gradients = &WgmmaGradientsBy<QueryGradientsBlock>},
      .small_m = &SmallM,
      .combine = &Combine,
      .terms = &Terms,
      .bias_gradients = &BiasGradients,
      .head_sums = &RunBlocks<HeadSumsBlock<EmulatedMachine>::kThreads, HeadSumsBlock>};
  return kLaunches;
}

}  // namespace heed::cuda
