// ALiBi slopes.
#include "heed/ops/positions/alibi.h"

#include <bit>
#include <cmath>
#include <string>

#include "heed/core/error.h"

namespace heed {

std::vector<double> AlibiSlopes(int64_t heads) {
  if (heads < 1 || heads > (int64_t{1} << 31)) {
    throw InvalidArgument("alibi_slopes: heads is " + std::to_string(heads) + ", expected at least 1");
  }
  const double n = static_cast<double>(std::bit_floor(static_cast<uint64_t>(heads)));
  std::vector<double> slopes;
  for (double h = 0; h < static_cast<double>(heads); ++h) {
    slopes.push_back(h < n ? std::exp2(-8 * (h + 1) / n) : std::exp2(-4 * (2 * (h - n) + 1) / n));
  }
  return slopes;
}

}  // namespace heed
