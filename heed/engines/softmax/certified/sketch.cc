// Bounds of softmax sums from a sketch: the choice of passes, and queries in fixed point.
#include "heed/engines/softmax/certified/sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "heed/core/dtype.h"
#include "heed/engines/softmax/certified/sketch_internal.h"

namespace heed::softmax {

SketchPasses SketchPassesFor(const Context& ctx) {
  const SketchPasses of_bytes = SketchOfBytes(ctx);
  return of_bytes.score != nullptr ? of_bytes : SketchOfTarget(ctx);
}

void PackSketchQuery(DType dtype, const void* q, int64_t depth, double scale, int r, SketchQueries* rows) {
  constexpr double kMost = 127 * 256;  // two digits, the high one from -127 on
  constexpr double kUp = 1 + 0x1p-18;  // f32 rounding
  // An element of a key is off by half a step plus 2^-16 of it for its own rounding. An element of the query is off by
  // half a unit, plus some for sums of digits beyond 2^24.
  constexpr double kHalfStep = 0.50002, kHalfUnit = 0.51, kMostStep = 127;
  double most = 0, sum = 0, squares = 0;
  bool known = true;
  for (int64_t e = 0; e < depth; ++e) {
    const double x = std::abs(LoadAsDouble(dtype, q, e));
    known = known && std::isfinite(x);
    most = std::max(most, x);
    sum += x;
    squares += x * x;
  }
  const double unit = most / kMost, size = std::abs(scale);
  const auto at = static_cast<size_t>(r);
  rows->factor[at] = static_cast<float>(scale * unit);
  rows->by_step[at] = static_cast<float>(size * sum * kHalfStep * kUp);
  rows->by_error[at] = static_cast<float>(size * std::sqrt(squares) * kUp);
  rows->by_query[at] = static_cast<float>(size * unit * kHalfUnit * kMostStep * static_cast<double>(depth) * kUp);
  const double factor = std::abs(static_cast<double>(rows->factor[at]));
  const bool small = factor < std::numeric_limits<float>::min() && size * unit != 0;
  known = known && !small && std::isfinite(rows->by_query[at]) && std::isfinite(rows->by_step[at]);
  if (!known) rows->factor[at] = std::numeric_limits<float>::quiet_NaN();

  int32_t sums[2] = {0, 0};
  rows->quads = (depth + 3) / 4;
  for (int64_t quad = 0; quad < rows->quads; ++quad) {
    uint32_t words[2] = {0, 0};
    for (int64_t i = 0; i < 4 && 4 * quad + i < depth; ++i) {
      const double x = most == 0 || !known ? 0 : std::nearbyint(LoadAsDouble(dtype, q, 4 * quad + i) / unit);
      const auto m = static_cast<int32_t>(std::clamp(x, -kMost, kMost));
      const int32_t low = ((m + 128) & 255) - 128, high = (m - low) / 256;
      sums[0] += high;
      sums[1] += low;
      words[0] |= (static_cast<uint32_t>(high) & 255) << (8 * i);
      words[1] |= (static_cast<uint32_t>(low) & 255) << (8 * i);
    }
    for (int k = 0; k < 2; ++k) {
      rows->words[(quad * rows->num_rows + r) * 2 + k] = static_cast<int32_t>(words[k]);
    }
  }
  rows->starts[at][0] = -128 * sums[0];
  rows->starts[at][1] = -128 * sums[1];
}

}  // namespace heed::softmax
