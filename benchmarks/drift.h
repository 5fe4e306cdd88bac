// Drift: a table of the errors of recurrences as sequences grow.
#ifndef BENCHMARKS_DRIFT_H_
#define BENCHMARKS_DRIFT_H_

#include <string>
#include <vector>

namespace heed::bench {

struct DriftResult {
  std::string mechanism, decays;  // "none", "ordinary", "strong", "vanishing", "faint"
  std::vector<double> errors;     // one per length
};

// Measures every mechanism that has a step; `progress` is called before each row.
std::vector<DriftResult> MeasureDrift(void (*progress)(const std::string&));

std::string DriftTable(const std::vector<DriftResult>& results);
std::string DriftJson(const std::vector<DriftResult>& results);

}  // namespace heed::bench

#endif  // BENCHMARKS_DRIFT_H_
