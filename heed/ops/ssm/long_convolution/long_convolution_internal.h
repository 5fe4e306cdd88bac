// The definition of the long convolution for the engine: its tensors, and their members in the engine's structs.
#ifndef HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_
#define HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution.h"

namespace heed::long_convolution {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::long_convolution

#endif  // HEED_OPS_SSM_LONG_CONVOLUTION_LONG_CONVOLUTION_INTERNAL_H_
