// The channels and sequences that references of scans loop over.
#include "heed/mechanism/reference/scanning_reference_internal.h"

#include <algorithm>

namespace heed::scanning {

std::vector<ReferencePlace> PlacesOf(int64_t B, int64_t T, int64_t D, const Options& options) {
  std::vector<ReferencePlace> places;
  const auto ranges = mechanism::SequencesOf(options, B, T);
  for (size_t i = 0; i < ranges.size(); ++i) {
    ReferencePlace place = {static_cast<int64_t>(i), ranges[i].batch, 0, {}};
    for (int64_t t = ranges[i].begin; t < ranges[i].end; ++t) place.tokens.push_back(t);
    if (options.reverse) std::reverse(place.tokens.begin(), place.tokens.end());
    for (; place.channel < D; ++place.channel) places.push_back(place);
  }
  return places;
}

Epsilon EpsilonOf(DType dtype) {
  switch (dtype) {
    case DType::kF64: return {0x1p-52, 1e-290, 0, 0};
    case DType::kF32: return {0x1p-24, 1e-34, 0x1p-24, 0};
    case DType::kBF16: return {0x1p-24, 1e-34, 1.01 * 0x1p-8, 0};
    default: return {0x1p-24, 1e-34, 1.01 * 0x1p-11, 0x1p-25};
  }
}

}  // namespace heed::scanning
