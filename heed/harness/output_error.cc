// OutputError: sums over elements, in double.
#include "heed/harness/output_error.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace heed {

void OutputErrorSum::Add(const ConstTensorView& o, const ConstTensorView& expected) {
  for (int64_t i = 0, n = o.num_elements(); i < n; ++i) {
    const double x = LoadAsDouble(o.dtype(), o.data(), i);
    const double y = LoadAsDouble(expected.dtype(), expected.data(), i);
    const bool same = x == y || (std::isnan(x) && std::isnan(y));
    const double difference = same ? 0 : std::abs(x - y);
    if (!std::isfinite(difference)) comparable_ = false;
    max_ = std::max(max_, difference);
    squares_ += difference * difference;
    if (std::isfinite(y)) norm_ += y * y;
  }
}

OutputError OutputErrorSum::Result() const {
  if (!comparable_) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    return {nan, nan};
  }
  return {max_, squares_ == 0 ? 0 : std::sqrt(squares_ / norm_)};
}

OutputError MeasureError(const ConstTensorView& o, const ConstTensorView& expected) {
  OutputErrorSum sum;
  sum.Add(o, expected);
  return sum.Result();
}

}  // namespace heed
