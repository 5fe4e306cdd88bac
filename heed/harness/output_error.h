// OutputError: how far an output is from what it should be, all elements together.
#ifndef HEED_HARNESS_OUTPUT_ERROR_H_
#define HEED_HARNESS_OUTPUT_ERROR_H_

#include "heed/core/tensor.h"

namespace heed {

// |o - expected|: the largest, and the root of the sum of squares over that of
// `expected`. NaN where one of them alone is NaN or infinite.
struct OutputError {
  double max = 0, relative = 0;
};

// Of any number of pairs of row-major tensors.
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
