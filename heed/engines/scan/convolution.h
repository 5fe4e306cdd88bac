// The method of a convolution with taps: tap by tap, or by Fourier transforms of blocks.
#ifndef HEED_ENGINES_SCAN_CONVOLUTION_H_
#define HEED_ENGINES_SCAN_CONVOLUTION_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "heed/engines/scan/fourier.h"
#include "heed/engines/scan/problem.h"

namespace heed::scan {

// The cost of one token of a transform in multiply-adds of a direct convolution, as measured (table in
// docs/performance.md).
inline constexpr int64_t kTapsPerTransformed = 64;

// The length of the transforms for a sequence of `count` tokens, or 0 for a direct convolution. It depends only on the
// two arguments, so that bits do not depend on the other sequences of a call.
inline int64_t TransformLength(int64_t num_taps, int64_t count) {
  const int64_t taps = std::min(num_taps, count);
  if (taps == 0) return 0;
  const auto least = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(taps)));
  const int64_t n = std::max(least, kMinFourierLength), blocks = (count + n - 1) / n;
  return taps * count <= kTapsPerTransformed * blocks * n ? 0 : n;
}

// The number of operations, counted as usual: two per tap and token, or 5 (log2 n + 2) per element of a transform, with
// one transform of the taps and two per block. Gradients take three times as many, or three transforms per block and
// two for the taps.
inline double Operations(int64_t num_taps, int64_t count, bool backward) {
  const int64_t n = TransformLength(num_taps, count);
  if (n == 0) return (backward ? 6.0 : 2.0) * static_cast<double>(std::min(num_taps, count) * count);
  const int64_t blocks = (count + n - 1) / n;
  const int64_t elements = n * (backward ? 3 * blocks + 2 : 2 * blocks + 1);
  return 5 * (std::log2(static_cast<double>(n)) + 2) * static_cast<double>(elements);
}

// True if modes are cheaper in convolution mode: if there are more of them than one token of a transform costs.
inline constexpr int64_t kModesPerTransformed = 64;
inline bool PrefersTaps(const Problem& p) { return p.states > kModesPerTransformed; }

// Spectra of gradients of taps that are summed before they are transformed back.
inline constexpr size_t kBlocksPerSum = 8;

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_CONVOLUTION_H_
