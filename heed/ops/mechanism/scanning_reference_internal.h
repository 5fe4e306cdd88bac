// How references of scans walk a call: a channel of a sequence at a time, in double.
#ifndef HEED_OPS_MECHANISM_SCANNING_REFERENCE_INTERNAL_H_
#define HEED_OPS_MECHANISM_SCANNING_REFERENCE_INTERNAL_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/ops/mechanism/reference_tensor_internal.h"
#include "heed/ops/mechanism/scanning.h"

namespace heed::scanning {

using Doubles = std::vector<double>;

// One channel of one sequence.
struct ReferencePlace {
  int64_t sequence, batch, channel;
  std::vector<int64_t> tokens;  // in the order in which they are taken
};

// All of them, of a call that a kernel's checks would accept.
std::vector<ReferencePlace> PlacesOf(int64_t B, int64_t T, int64_t D, const Options& options);

// Rounding of a dtype, with u the unit roundoff of what is computed in. f64's counts twice, as the
// reference rounds as much.
struct Epsilon {
  double unit = 0;       // u
  double least = 0;      // below it, a result may be 0
  double output = 0;     // of what is stored in 16 bits
  double subnormal = 0;  // and where that is subnormal
};
Epsilon EpsilonOf(DType dtype);

// The allowed error of a value that is computed with `error`, once it is stored.
inline double Stored(double value, double error, const Epsilon& e) {
  return 1.01 * error + e.least + e.output * (std::abs(value) + error) + e.subnormal;
}

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double Softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_REFERENCE_INTERNAL_H_
