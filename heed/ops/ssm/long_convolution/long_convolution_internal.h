// The definition of the long convolution: which tensors it takes, and where the engine finds them.
#ifndef HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_
#define HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_

#include "heed/ops/mechanism/scanning_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution.h"

namespace heed::long_convolution {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::long_convolution

#endif  // HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_
