// Problems of compressed attention with their memory, for cases and tests.
#ifndef HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_CASE_H_
#define HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_CASE_H_

#include <cstdint>
#include <span>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/sparse/common/sparse_case.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"

namespace heed::compressed_attention {

using Problem = sparse::Problem<BackwardInputs, Options>;

// Describes row-major o and lse and, with d_o, every gradient.
void Describe(Problem& problem);

// Views of gradients by name.
Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views);

// Writes up to as many distinct keys as `row` has, random ones of the first `complete` in ascending order, after -1.
void ChooseKeys(Random& random, int64_t complete, std::span<int64_t> row);

// A random problem, which depends on its arguments only.
Problem RandomProblem(DType dtype, uint64_t seed);

}  // namespace heed::compressed_attention

#endif  // HEED_OPS_SPARSE_COMPRESSED_ATTENTION_COMPRESSED_ATTENTION_CASE_H_
