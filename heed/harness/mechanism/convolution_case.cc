// Error bounds of direct sums, and those of FFTs, which fourier.h derives.
#include "heed/harness/mechanism/convolution_case.h"

#include <algorithm>
#include <cmath>

#include "heed/engines/scan/convolution.h"

namespace heed::scanning {
namespace {

double Norm(const Doubles& x, size_t begin, size_t end) {
  double sum = 0;
  for (size_t i = begin; i < std::min(end, x.size()); ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}

// The elements of an FFT block; 0 for direct sums.
size_t LengthOf(const Doubles& x, int64_t num_taps) {
  return static_cast<size_t>(scan::TransformLength(num_taps, static_cast<int64_t>(x.size())));
}

// The error relative to the product of norms.
double TransformError(size_t n, double u) { return 13 * (std::log2(static_cast<double>(n)) + 4) * u; }

}  // namespace

Doubles ConvolvedMagnitudes(const Doubles& taps, const Doubles& x, size_t count) {
  Doubles sums(count, 0.0);
  for (size_t s = 0; s < std::min(taps.size(), count); ++s) {
    for (size_t t = s; t < count; ++t) sums[t] += std::abs(taps[s] * x[t - s]);
  }
  return sums;
}

Doubles ConvolutionErrors(const Doubles& taps, const Doubles& x, double D, int64_t num_taps, bool from_end, double u) {
  const size_t n = LengthOf(x, num_taps), T = x.size();
  Doubles errors(T);
  if (n == 0) {
    const Doubles sizes = ConvolvedMagnitudes(taps, x, T);
    for (size_t t = 0; t < T; ++t) {
      errors[t] = (static_cast<double>(taps.size()) + 2) * u * (sizes[t] + std::abs(D * x[t]));
    }
    return errors;
  }
  const double of_taps = Norm(taps, 0, taps.size());
  const size_t zeros = from_end ? (n - T % n) % n : 0;
  for (size_t t = 0; t < T; ++t) {
    const size_t block = (t + zeros) / n * n;
    const double of_x = Norm(x, block < n + zeros ? 0 : block - n - zeros, block + n - zeros);
    const double error = TransformError(n, u) * of_taps * of_x;
    errors[t] = error + 4 * u * (of_taps * of_x + std::abs(D * x[t]));
  }
  return errors;
}

Doubles TapErrors(const Doubles& x, const Doubles& dy, size_t taps, int64_t num_taps, bool is_f64, double u) {
  const size_t n = LengthOf(x, num_taps), T = x.size();
  Doubles errors(taps);
  if (n == 0) {
    const Doubles sizes = ConvolvedMagnitudes({dy.rbegin(), dy.rend()}, x, T);
    const double of_sums = is_f64 ? static_cast<double>(T) / 128 : 1;
    for (size_t s = 0; s < taps; ++s) errors[s] = (131 + of_sums) * u * sizes[T - 1 - s];
    return errors;
  }
  double error = 0;
  for (size_t begin = 0; begin < T; begin += n) {  // each block of x with two of dy
    const double of_dy = Norm(dy, begin, begin + 2 * n), of_x = Norm(x, begin, begin + n);
    error += (TransformError(n, u) + (scan::kBlocksPerSum + 2) * u) * of_dy * of_x;
  }
  std::fill(errors.begin(), errors.end(), error);
  return errors;
}

}  // namespace heed::scanning
