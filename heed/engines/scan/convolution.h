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

// The cost of one token of a transform, in products of a tap and a token: measured,
// docs/performance.md has the table.
inline constexpr int64_t kTapsPerTransformed = 64;

// Elements of a block of a sequence of `count` tokens with as many taps; 0: directly. A matter of the
// two alone, so that bits do not depend on what else is in a call.
inline int64_t TransformLength(int64_t num_taps, int64_t count) {
  const int64_t taps = std::min(num_taps, count);
  if (taps == 0) return 0;
  const auto least = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(taps)));
  const int64_t n = std::max(least, kMinFourierLength), blocks = (count + n - 1) / n;
  return taps * count <= kTapsPerTransformed * blocks * n ? 0 : n;
}

// Operations that this takes, of the two methods' usual counts: two per tap and token, or
// 5 (log2 n + 2) per element of a transform, of the taps, of each block, and back. Three times as many
// for gradients, or three transforms per block and two for the taps.
inline double Operations(int64_t num_taps, int64_t count, bool backward) {
  const int64_t n = TransformLength(num_taps, count);
  if (n == 0) return (backward ? 6.0 : 2.0) * static_cast<double>(std::min(num_taps, count) * count);
  const int64_t blocks = (count + n - 1) / n;
  const int64_t elements = n * (backward ? 3 * blocks + 2 : 2 * blocks + 1);
  return 5 * (std::log2(static_cast<double>(n)) + 2) * static_cast<double>(elements);
}

// True if modes are cheaper as taps: if there are more of them than one token of a transform costs.
inline constexpr int64_t kModesPerTransformed = 64;
inline bool PrefersTaps(const Problem& p) { return p.states > kModesPerTransformed; }

// Spectra of gradients of taps that add up before they are transformed back.
inline constexpr size_t kBlocksPerSum = 8;

}  // namespace heed::scan

#endif  // HEED_ENGINES_SCAN_CONVOLUTION_H_
