// Delta rules in double, a token and an element at a time, and how far rounding may take a
// kernel from that.
#ifndef HEED_OPS_MECHANISM_DELTA_REFERENCE_INTERNAL_H_
#define HEED_OPS_MECHANISM_DELTA_REFERENCE_INTERNAL_H_

#include "heed/ops/mechanism/recurrent.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::recurrent {

// Checks nothing: arguments are a kernel's that has. Outputs may be f64.
void DeltaReference(const Definition& definition, const Inputs& in, const Options& options,
                    const Outputs& out);
void DeltaBackwardReference(const Definition& definition, const BackwardInputs& in,
                            const Options& options, const Gradients& out);

// The allowed error of each output; .cc says why.
void DeltaTolerance(const Definition& definition, const Inputs& in, const Options& options,
                    const Outputs& expected, const Outputs& tolerance);
void DeltaBackwardTolerance(const Definition& definition, const BackwardInputs& in,
                            const Options& options, const Gradients& expected,
                            const Gradients& tolerance);

}  // namespace heed::recurrent

#endif  // HEED_OPS_MECHANISM_DELTA_REFERENCE_INTERNAL_H_
