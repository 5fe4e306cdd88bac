// Advise: recommends a mechanism and its options for given tensors, a length and a budget.
//
// Every candidate is planned at the requested length, predicted by a cost model and, given tensors, run on a sample of
// them: timed, and compared with exact attention in float64. Then the candidates are ranked.
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
#include "heed/advise/divided.h"
#include "heed/advise/rank.h"
#include "heed/harness/tensor_file.h"

namespace heed::advise {

// Returns the tensors of one layer, in f64, f32 or any other dtype: those of `inputs` that exist, and their first
// `tokens`, or all. Throws as LoadNamed().
using Source = std::function<NamedTensors(std::span<const InputSpec> inputs, std::optional<int64_t> tokens)>;

struct Request {
  Purpose purpose = Purpose::kPrefill;
  attention::Options exact;       // options of the exact attention that outputs are compared with, without tensors;
                                  // decoding is causal
  Source source;                  // null: nothing is run, and only shapes are known
  Sizes sizes;                    // without a source; as many queries as keys
  std::optional<int64_t> length;  // tokens, at least 1; default: those of the tensors
  Budget budget;
  std::vector<std::string> mechanisms = {};  // only these mechanisms, by name; empty: all
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16};
  int threads = 1;
  std::string isa;                   // limit of the SIMD target; empty: none
  double seconds = 10;               // approximate time for running candidates; limits the sample of tokens
  const CostModel* model = nullptr;  // null: nothing is predicted
  std::optional<Cluster> cluster =
      {};  // also predicts each row for these processes; ranks and budgets are those of one
  std::function<void(double share, const std::string& what)> progress = {};
};

struct Advice {
  int64_t length = 0;                                         // length that rows are ranked at
  int64_t sample_tokens = 0;                                  // tokens that candidates ran on; 0: none ran
  Sizes sizes;                                                // of the problem, with that length
  std::vector<Row> rows;                                      // by rank
  std::vector<std::pair<std::string, std::string>> left_out;  // mechanism, reason
};

// Throws InvalidArgument for sizes or a length out of range and, with a remedy, if no mechanism takes these tensors or
// no candidate is within the budget; also throws exceptions of the source.
Advice Advise(const Request& request);

// The number of tokens, a multiple of 64 unless it is all of them, for which work that grows as tokens^2 and takes
// `seconds` for all tokens takes at most `most`.
int64_t SampleTokens(int64_t tokens, double seconds, double most);

}  // namespace heed::advise

#endif  // HEED_ADVISE_ADVISE_H_
