// The launches that libheed_cuda has for this engine.
#ifndef HEED_ENGINES_SCAN_CUDA_LAUNCHES_H_
#define HEED_ENGINES_SCAN_CUDA_LAUNCHES_H_

#include "heed/cuda/library.h"
#include "heed/engines/scan/cuda/backward_block.h"
#include "heed/engines/scan/cuda/forward_block.h"
#include "heed/engines/scan/cuda/params.h"
#include "heed/engines/scan/cuda/sum_blocks.h"

namespace heed::scan::cuda {

struct Launches {
  const char* (*forward)(const heed::cuda::Launch& launch, const ScanParams& params);
  const char* (*backward)(const heed::cuda::Launch& launch, const GradientParams& params);
  const char* (*token_sums)(const heed::cuda::Launch& launch, const TokenSumParams& params);
  const char* (*constant_sums)(const heed::cuda::Launch& launch, const ConstantSumParams& params);
};

}  // namespace heed::scan::cuda

#endif  // HEED_ENGINES_SCAN_CUDA_LAUNCHES_H_
