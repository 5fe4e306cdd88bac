// Sinusoidal position encoding from its formulas, one element at a time.
#include <cmath>
#include <cstdint>

#include "heed/ops/positions/sinusoidal.h"

namespace heed {

void SinusoidalReference(SinusoidalOrder order, const TensorView& table) {
  using Real = long double;
  const int64_t D = table.size(1);
  for (int64_t p = 0; p < table.size(0); ++p) {
    for (int64_t d = 0; d < D; ++d) {
      int64_t i = d / 2;
      bool is_sine = d % 2 == 0;
      Real exponent = Real{2} * static_cast<Real>(i) / static_cast<Real>(D);
      if (order == SinusoidalOrder::kConcatenated) {
        const int64_t half = D / 2;
        is_sine = d < half || d == 2 * half;
        i = d == 2 * half ? half : d % half;
        exponent = half <= 1 ? static_cast<Real>(i) : static_cast<Real>(i) / static_cast<Real>(half - 1);
      }
      const Real angle = static_cast<Real>(p) * std::pow(Real{10000}, -exponent);
      StoreDouble(table.dtype(), table.data(), p * table.stride(0) + d * table.stride(1),
                  static_cast<double>(is_sine ? std::sin(angle) : std::cos(angle)));
    }
  }
}

}  // namespace heed
