// Shared by the files of SSD.
#ifndef HEED_OPS_SSM_SSD_SSD_INTERNAL_H_
#define HEED_OPS_SSM_SSD_SSD_INTERNAL_H_

#include "heed/ops/ssm/ssd/ssd.h"

namespace heed::ssd {

// The allowed error of each output; ssd_reference.cc says why.
void Tolerance(const Inputs& in, const Options& options, const Outputs& expected,
               const Outputs& tolerance);
void BackwardTolerance(const BackwardInputs& in, const Options& options,
                       const Gradients& expected, const Gradients& tolerance);

}  // namespace heed::ssd

#endif  // HEED_OPS_SSM_SSD_SSD_INTERNAL_H_
