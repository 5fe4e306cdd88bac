// Advise: which mechanism, with which options, for given tensors, a length and a budget.
//
// Every candidate is planned at the length that is asked for, predicted by a cost model and, where there are tensors,
// run on a sample of them: timed, and compared with exact attention in float64. Then they are ranked.
#ifndef HEED_ADVISE_ADVISE_H_
#define HEED_ADVISE_ADVISE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/advise/candidate.h"
#include "heed/advise/cost_model.h"
#include "heed/advise/rank.h"
#include "heed/harness/tensor_file.h"

namespace heed::advise {

// The tensors of one layer, in f64, f32 or what else they have: those of `inputs` that are there, and of these the
// first `tokens`, or all. Throws as LoadNamed().
using Source = std::function<NamedTensors(std::span<const InputSpec> inputs, std::optional<int64_t> tokens)>;

struct Request {
  Purpose purpose = Purpose::kPrefill;
  attention::Options exact;       // what the outputs should be, without tensors; decoding is causal
  Source source;                  // null: nothing is run, and shapes alone are known
  Sizes sizes;                    // without a source; as many queries as keys
  std::optional<int64_t> length;  // tokens, at least 1; default: those of the tensors
  Budget budget;
  std::vector<std::string> mechanisms = {};  // only these, by name; empty: all
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16};
  int threads = 1;
  std::string isa;                   // cap of the SIMD target; empty: none
  double seconds = 10;               // that running candidates may take, about; a sample of the tokens keeps to it
  const CostModel* model = nullptr;  // null: nothing is predicted
  std::function<void(double share, const std::string& what)> progress = {};
};

struct Advice {
  int64_t length = 0;                                         // that rows are ranked at
  int64_t sample_tokens = 0;                                  // that candidates ran on; 0: none did
  Sizes sizes;                                                // of the problem, with that length
  std::vector<Row> rows;                                      // by rank
  std::vector<std::pair<std::string, std::string>> left_out;  // mechanism, reason
};

// Throws InvalidArgument for sizes or a length that are out of range, and, saying what to do, where nothing takes these
// tensors or nothing is within the budget; and what the source throws.
Advice Advise(const Request& request);

// So many of `tokens`, a multiple of 64 where they are not all, that work which grows as tokens^2 and takes `seconds`
// of all of them takes at most `most`.
int64_t SampleTokens(int64_t tokens, double seconds, double most);

}  // namespace heed::advise

#endif  // HEED_ADVISE_ADVISE_H_
