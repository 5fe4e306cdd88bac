// The forward kernels of small-M blocks and the kernel that combines splits, and their launches.
#include "heed/engines/softmax/cuda/forward_kernel.h"

namespace heed::softmax::cuda {
const char* LaunchSmallM(const heed::cuda::Launch& launch, const ForwardParams& params) {
  return WithSmallMShape(params.dtype, params.depth, params.value_depth,
                         [&](auto shape) { return LaunchForward<decltype(shape), true>(launch, params); });
}
const char* LaunchCombine(const heed::cuda::Launch& launch, const ForwardParams& params) {
  return heed::cuda::LaunchBlock<CombineBlock<heed::cuda::GpuMachine>, kCombineThreads>(launch, 0, params);
}

}  // namespace heed::softmax::cuda
