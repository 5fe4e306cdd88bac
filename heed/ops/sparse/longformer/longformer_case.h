// Problems of longformer with their memory, for cases and tests.
#ifndef HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_CASE_H_
#define HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_CASE_H_

#include <cstdint>
#include <span>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/sparse/common/sparse_case.h"
#include "heed/ops/sparse/longformer/longformer.h"

namespace heed::longformer {

using Problem = sparse::Problem<BackwardInputs, Options>;

// Describes row-major o and lse and, with d_o, every gradient.
void Describe(Problem& problem);

// Views of gradients by name.
Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views);

// A random problem, which depends on its arguments only.
Problem RandomProblem(DType dtype, uint64_t seed);

}  // namespace heed::longformer

#endif  // HEED_OPS_SPARSE_LONGFORMER_LONGFORMER_CASE_H_
