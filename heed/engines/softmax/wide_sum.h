// Sums of many numbers, of which differences are needed: kept in two doubles, with non-finite terms counted instead of
// added.
#ifndef HEED_ENGINES_SOFTMAX_WIDE_SUM_H_
#define HEED_ENGINES_SOFTMAX_WIDE_SUM_H_

#include <cstdint>
#include <limits>

namespace heed::softmax {

// Subtracting a term that was added leaves no trace, even for -inf and NaN. Terms beyond 2^960 count as infinite, so
// that no sum overflows.
struct WideSum {
  double high = 0, low = 0;
  int64_t cuts = 0, broken = 0;  // number of terms of -inf; of NaN and +inf

  void Add(double x) {
    constexpr double kMost = 0x1p960;
    if (x < -kMost) {
      ++cuts;
    } else if (!(x <= kMost)) {
      ++broken;
    } else {  // exact: high + low changes by exactly x
      const double sum = high + x, added = sum - high;
      low += (high - (sum - added)) + (x - added);
      high = sum;
    }
  }

  void Add(const WideSum& other, int sign = 1) {
    Add(sign * other.high);
    low += sign * other.low;
    cuts += sign * other.cuts;
    broken += sign * other.broken;
  }

  double Value() const {
    if (broken != 0) return std::numeric_limits<double>::quiet_NaN();
    return cuts != 0 ? -std::numeric_limits<double>::infinity() : high + low;
  }
};

// Returns the sum of the terms between two partial sums of one series: those in `to` but not in `from`.
inline double Between(const WideSum& from, const WideSum& to) {
  return WideSum{to.high - from.high, to.low - from.low, to.cuts - from.cuts, to.broken - from.broken}.Value();
}

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_WIDE_SUM_H_
