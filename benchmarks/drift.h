// Drift: a table of the errors of recurrences as sequences grow.
#ifndef BENCHMARKS_DRIFT_H_
#define BENCHMARKS_DRIFT_H_

#include <string>
#include <vector>

#include "benchmarks/rows.h"

namespace heed::bench {

struct DriftResult {
  std::string mechanism, decays;  // "none", "ordinary", "strong", "vanishing", "faint"
  std::vector<double> errors;     // one per length
};

// Measures every mechanism that has a step. Names of rows are "gla ordinary".
std::vector<DriftResult> MeasureDrift(const Rows& rows);

// Return the lines above the first row, and one row.
std::string DriftHeader();
std::string DriftRow(const DriftResult& result);
std::string DriftJson(const std::vector<DriftResult>& results);

}  // namespace heed::bench

#endif  // BENCHMARKS_DRIFT_H_
