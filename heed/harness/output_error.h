// OutputError: the distance of an output from its expected values, over all elements.
#ifndef HEED_HARNESS_OUTPUT_ERROR_H_
#define HEED_HARNESS_OUTPUT_ERROR_H_

#include "heed/core/tensor.h"

namespace heed {

// Errors |o - expected|: the largest, and the root of their sum of squares relative to that of `expected`. NaN if only
// one of the two is NaN or infinite.
struct OutputError {
  double max = 0, relative = 0;
};

// Accumulates the error of any number of pairs of row-major tensors.
class OutputErrorSum {
 public:
  void Add(const ConstTensorView& o, const ConstTensorView& expected);
  OutputError Result() const;

 private:
  bool comparable_ = true;
  double max_ = 0, squares_ = 0, norm_ = 0;
};

OutputError MeasureError(const ConstTensorView& o, const ConstTensorView& expected);

}  // namespace heed

#endif  // HEED_HARNESS_OUTPUT_ERROR_H_
