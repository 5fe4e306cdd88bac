// Common parts of the tests of attention: calls with their own outputs, and other calls for the same rows, which must
// be bitwise equal.
#ifndef HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_VARIATIONS_CASE_H_
#define HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_VARIATIONS_CASE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/ops/exact/attention/cases/attention_case.h"

namespace heed::attention {

// Outputs of one call, in fresh memory initialised to NaN.
struct Result {
  Buffer o, lse;
};
Result RunForward(Context& ctx, const Problem& problem);
Result RunReference(const Problem& problem);  // in f64

// The gradients of problem.gradients, in that order, computed from Forward's outputs for the problem, in fresh memory
// initialised to NaN.
std::vector<Buffer> RunBackward(Context& ctx, const Problem& problem);
std::vector<Buffer> RunBackwardReference(const Problem& problem);  // f64

// The problem with a d_o and a d_lse and all gradients.
Problem WithGradients(Problem problem, uint64_t seed);

// N(0, 1) inputs, row-major, with both outputs; the caller adds options.
Problem MakeProblem(DType dtype, const Sizes& sizes, uint64_t seed = 1);

// Makes the problem own the tensor.
ConstTensorView Keep(Problem& problem, const Buffer& buffer);
ConstTensorView KeepInts(Problem& problem, std::vector<int64_t> values, DType dtype = DType::kI64);
ConstTensorView KeepFloats(Problem& problem, std::vector<double> values, DType dtype = DType::kF32);

// Sizes of a problem that is not packed.
Sizes SizesOf(const Problem& problem);

// The problem with the same values in other memory: every tensor is new, with another order of axes, gaps and negative
// strides.
Problem Restrided(const Problem& problem, uint64_t seed);

// Parts of a problem that is not packed, as problems of their own. Positions are explicit, so they stay the same.
Problem OneSequence(const Problem& problem, int64_t b);
Problem OneKeyHead(const Problem& problem, int64_t key_head);
Problem SomeQueries(const Problem& problem, int64_t begin, int64_t end);

// The problem in a longer batch: `left` keys before the first, `right` keys and queries after the last, all NaN and
// excluded by starts and lengths. Positions shift by `left`, which would change the dropout mask.
Problem Padded(const Problem& problem, int64_t left, int64_t right);

// The sequences of a problem packed; null where an option forbids it.
std::optional<Problem> Packed(const Problem& problem);

// Slices each option along one of its axes, named as in the rows of options.
void SliceOptions(Options& options, char axis, int64_t begin, int64_t end);

// Empty if bitwise equal, else a description of the difference. Any NaN equals any NaN: its payload is unspecified.
std::string Difference(const ConstTensorView& a, const ConstTensorView& b);
std::string Difference(const Result& a, const Result& b);
std::string Difference(const std::vector<Buffer>& a, const std::vector<Buffer>& b);

// Calls `f` with the keys that each row sees, without those masked, also by a bias or logit of -inf.
using SeenKeys = std::function<void(int64_t b, int64_t h, int64_t i, const std::vector<int64_t>& keys)>;
void ForEachRow(const Problem& problem, const SeenKeys& f);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_VARIATIONS_CASE_H_
