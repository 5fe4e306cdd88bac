// The loop of references of scans over a call: a channel of a sequence at a time, in double.
#ifndef HEED_MECHANISM_REFERENCE_SCANNING_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_SCANNING_REFERENCE_INTERNAL_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/mechanism/scanning.h"

namespace heed::scanning {

using Doubles = std::vector<double>;

// One channel of one sequence.
struct ReferencePlace {
  int64_t sequence, batch, channel;
  std::vector<int64_t> tokens;  // in the order of processing
};

// All places of a call that a kernel's checks would accept.
std::vector<ReferencePlace> PlacesOf(int64_t B, int64_t T, int64_t D, const Options& options);

// Rounding errors for a dtype, with u the unit roundoff of the accumulation dtype. For f64 u is doubled, as the
// reference has the same rounding.
struct Epsilon {
  double unit = 0;       // u
  double least = 0;      // smaller results may be flushed to 0
  double output = 0;     // of results stored in 16 bits
  double subnormal = 0;  // and of subnormal 16-bit results
};
Epsilon EpsilonOf(DType dtype);

// The tolerance of a value computed with `error` and then stored.
inline double Stored(double value, double error, const Epsilon& e) {
  return 1.01 * error + e.least + e.output * (std::abs(value) + error) + e.subnormal;
}

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double Softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace heed::scanning

#endif  // HEED_MECHANISM_REFERENCE_SCANNING_REFERENCE_INTERNAL_H_
