// Accuracy: the largest error of each dtype over many problems, compared with its bound.
#ifndef BENCHMARKS_ACCURACY_H_
#define BENCHMARKS_ACCURACY_H_

#include <string>
#include <vector>

#include "benchmarks/rows.h"
#include "heed/core/dtype.h"

namespace heed::bench {

struct AccuracyResult {
  std::string mechanism, what;
  DType dtype;
  int problems;
  double max_error;     // over all elements
  double error, bound;  // of the element that is closest to its bound
  bool ok;
};

// Runs random options of every mechanism, and attention with logits up to +-50. Names of rows have the form
// "accuracy attention f32 random options".
std::vector<AccuracyResult> MeasureAccuracy(const Rows& rows);

// Return the lines above the first row, and one row.
std::string AccuracyHeader();
std::string AccuracyRow(const AccuracyResult& result);
std::string AccuracyJson(const std::vector<AccuracyResult>& results);

}  // namespace heed::bench

#endif  // BENCHMARKS_ACCURACY_H_
