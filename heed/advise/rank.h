// Ranking: orders candidates under a budget, with reasons.
#ifndef HEED_ADVISE_RANK_H_
#define HEED_ADVISE_RANK_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "heed/advise/candidate.h"
#include "heed/advise/divided.h"
#include "heed/core/dtype.h"
#include "heed/harness/output_error.h"

namespace heed::advise {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// The results of a candidate. Unknown numbers are kUnknown.
struct Row {
  std::string mechanism, options, python;
  DType dtype = DType::kF32;
  int threads = 1;
  std::vector<std::string> assumed = {};
  bool is_softmax = true, is_causal = false;

  double predicted_seconds = kUnknown;         // at the requested length
  double measured_seconds = kUnknown;          // on the sample
  double predicted_sample_seconds = kUnknown;  // on the sample
  double seconds = kUnknown;  // ranking time: measured if the sample has the requested length, else predicted
  Memory memory = {};         // at that length
  OutputError error = {kUnknown, kUnknown};  // on the sample, against exact attention
  double kept = 1;                           // fraction of visible pairs kept on the sample

  // With a cluster: predictions for its processes, or why a group does not take the call.
  std::vector<Divided> divided = {};
  std::string not_divided = {};

  // Set by Rank().
  int64_t rank = 0;       // from 1
  bool within = true;     // whether it is within the budget
  bool frontier = false;  // on the Pareto frontier of time and error
  std::string reason = {};

  double memory_bytes() const { return memory.arguments + memory.workspace + memory.state; }
};

struct Budget {
  std::optional<double> memory_bytes;
  std::optional<double> relative_error;  // root mean square error relative to that of the output
};

// Orders the rows, at least one: those within the budget by time, then the others by their excess. Each gets a rank and
// a reason in words; `is_causal` says whether exact attention is causal. Throws InvalidArgument with a remedy if no row
// is within the budget.
void Rank(const Budget& budget, bool is_causal, std::vector<Row>& rows);

// "12.5 MiB".
std::string BytesText(double bytes);

}  // namespace heed::advise

#endif  // HEED_ADVISE_RANK_H_
