// Problems of nsa with their memory: what its cases and tests are made of.
#ifndef HEED_OPS_SPARSE_NSA_NSA_CASE_H_
#define HEED_OPS_SPARSE_NSA_NSA_CASE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/sparse/nsa/nsa.h"

namespace heed::nsa {

// Arguments of one call. Copies share memory.
struct Problem {
  BackwardInputs in;  // what Forward returned is that of a run
  Options options;
  std::vector<OutputSpec> results;    // of Outputs, in its order
  std::vector<OutputSpec> gradients;  // that are asked for; empty: a forward pass
  std::vector<Buffer> memory;
  std::string note;  // joins the title

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

// Row-major results, and, with d_o, every gradient.
void Describe(Problem& problem);

// Views of results and gradients by name.
Outputs ToOutputs(std::span<const TensorView> views);
Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views);

// A random problem, a function of its arguments alone.
Problem RandomProblem(DType dtype, uint64_t seed);

}  // namespace heed::nsa

#endif  // HEED_OPS_SPARSE_NSA_NSA_CASE_H_
