// Ranking: which candidate comes first under a budget, and why.
#ifndef HEED_ADVISE_RANK_H_
#define HEED_ADVISE_RANK_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "heed/advise/candidate.h"
#include "heed/core/dtype.h"
#include "heed/harness/output_error.h"

namespace heed::advise {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// What is known of a candidate. Numbers are kUnknown where nobody knows them.
struct Row {
  std::string mechanism, options, python;
  DType dtype = DType::kF32;
  int threads = 1;
  std::vector<std::string> assumed = {};
  bool is_softmax = true, is_causal = false;

  double predicted_seconds = kUnknown;         // at the length that is asked for
  double measured_seconds = kUnknown;          // on the sample
  double predicted_sample_seconds = kUnknown;  // there
  double seconds = kUnknown;  // what counts: measured where the sample has the length that is asked for, else predicted
  Memory memory = {};         // at that length
  OutputError error = {kUnknown, kUnknown};  // on the sample, against exact attention
  double kept = 1;                           // the share of visible pairs there

  // Set by Rank().
  int64_t rank = 0;       // from 1
  bool within = true;     // the budget
  bool frontier = false;  // nothing is faster and as close, or as fast and closer
  std::string reason = {};

  double memory_bytes() const { return memory.arguments + memory.workspace + memory.state; }
};

struct Budget {
  std::optional<double> memory_bytes;
  std::optional<double> relative_error;  // root mean square, of that of the output
};

// Orders rows, of which there is at least one: those within the budget by time, then the others by how far they are
// outside of it. Each gets its rank and a reason in words; `is_causal` says whether exact attention is. Throws
// InvalidArgument that says what to do where no row is within the budget.
void Rank(const Budget& budget, bool is_causal, std::vector<Row>& rows);

// "12.5 MiB".
std::string BytesText(double bytes);

}  // namespace heed::advise

#endif  // HEED_ADVISE_RANK_H_
