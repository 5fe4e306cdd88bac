// The list of kernels and the choice from it.
#include "heed/engines/scan/kernels.h"

namespace heed::scan {

const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem, engine::Pass pass) {
  static constexpr const Kernel* kKernels[] = {
      &kCuda,  &kSelectiveF32,     &kSelectiveF64, &kConvolutionFourier, &kConvolutionDirect,
      &kModes, &kHeadsConvolution, &kHeads,        &kElementwise};
  return engine::Choose(kKernels, op, ctx, problem, pass);
}

}  // namespace heed::scan
