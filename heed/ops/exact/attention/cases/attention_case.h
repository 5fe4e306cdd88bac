// Problems of attention with their memory: what its cases and tests are made of.
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
  OutputSpec o, lse;                  // lse without sizes: not asked for
  ConstTensorView d_o, d_lse;         // of the backward pass
  std::vector<OutputSpec> gradients;  // that are asked for
  std::vector<Buffer> memory;         // of everything above
  std::string note;                   // joins the title

  std::vector<int64_t> LseSizes() const;
};

// Row-major outputs for `in`; lse in f32, or f64 for f64.
void DescribeOutputs(Problem& problem);

// A d_o, and all gradients that the problem can have, row-major.
void DescribeGradients(Problem& problem, uint64_t seed);

// Views of outputs, the gradients among them by name.
Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views);

// The case of a problem. What its tolerance is and why stands in the .cc.
Case MakeCase(const Problem& problem);

// The case of its backward pass, alone or with o and lse computed first and compared
// too.
Case MakeBackwardCase(const Problem& problem, bool with_forward);

// The case of Attend() over a cache that ends with the keys of the queries. Throws InvalidArgument for
// options that a cache does not take.
Case MakeStepCase(const Problem& problem);

// Sizes, layouts and options in one line.
std::string Title(const Problem& problem);

// A random problem, a function of its arguments alone.
Problem RandomProblem(DType dtype, uint64_t seed);

// The case of that problem under another pattern, with its backward pass if it asks for gradients. Throws
// InvalidArgument if the pattern does not fit, or fits only because there is no sequence.
Case MakeRandomCase(DType dtype, uint64_t seed, const Pattern& pattern);

// What 16 bits may err by the usual rule: twice the largest error of o if attention
// is computed as plainly as a framework does in q's dtype, logits, weights and
// outputs rounded to it and all else exact, and the rounding of the exact result.
double PlainBound(const Problem& problem);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_CASES_ATTENTION_CASE_H_
