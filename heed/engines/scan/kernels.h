// The kernels of the scan engine, best first: one list that dispatch, Explain and Workspace read.
#ifndef HEED_ENGINES_SCAN_KERNELS_H_
#define HEED_ENGINES_SCAN_KERNELS_H_

#include "heed/core/context.h"
#include "heed/engines/kernel_list.h"
#include "heed/engines/scan/problem.h"

namespace heed::scan {

// One token of each sequence is a step: the final states may be the initial ones.
using engine::BackwardBytes;
using engine::Reason;
using Passes = engine::Passes<Problem, Gradients>;
using Kernel = engine::Kernel<Problem, Gradients>;

// The first kernel that takes the problem. Throws Unsupported, with every kernel's reason, if none does.
const Kernel& Choose(const char* op, const Context& ctx, const Problem& problem,
                     engine::Pass pass = engine::Pass::kForward);

// Each kernel is in the file of its passes.
extern const Kernel kCuda, kSelectiveF32, kSelectiveF64, kConvolutionFourier, kConvolutionDirect, kModes,
    kHeadsConvolution, kHeads, kElementwise;

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_KERNELS_H_
