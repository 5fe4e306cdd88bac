// Problems of attention with their memory, for cases and tests.
#ifndef HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_CASE_H_
#define HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_CASE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// Arguments of one call. Copies share memory.
struct Problem {
  Inputs in;
  Options options;
  OutputSpec o, lse;                  // lse without sizes is not computed
  ConstTensorView d_o, d_lse;         // for the backward pass
  std::vector<OutputSpec> gradients;  // requested gradients
  std::vector<Buffer> memory;         // owns everything above
  std::string note;                   // appended to the title

  std::vector<int64_t> LseSizes() const;
};

// Row-major outputs for `in`; lse in f32, or f64 for f64.
void DescribeOutputs(Problem& problem);

// Adds a d_o and all gradients that the problem can have, row-major.
void DescribeGradients(Problem& problem, uint64_t seed);

// Views of outputs by gradient name.
Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views);

// The case of a problem. The .cc file derives its tolerance.
Case MakeCase(const Problem& problem);

// The case of its backward pass, alone or with o and lse computed first and compared
// too.
Case MakeBackwardCase(const Problem& problem, bool with_forward);

// The case of Attend() over a cache that ends with the keys of the queries. Throws InvalidArgument for
// options that a cache does not take.
Case MakeStepCase(const Problem& problem);

// Sizes, layouts and options in one line.
std::string Title(const Problem& problem);

// A random problem, which depends on its arguments only.
Problem RandomProblem(DType dtype, uint64_t seed);

// The case of a random problem under another pattern, with its backward pass if the problem has gradients. Throws
// InvalidArgument if the pattern does not fit, or fits only because there is no sequence.
Case MakeRandomCase(DType dtype, uint64_t seed, const Pattern& pattern);

// The usual error bound of 16-bit attention: twice the largest error of o if attention is computed plainly in q's
// dtype, with logits, probabilities and outputs rounded to it and all else exact, plus the rounding of the exact
// result.
double PlainBound(const Problem& problem);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_CASE_H_
