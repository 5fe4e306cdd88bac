// Bits of the keys that a row sees: from intervals, patterns, and masks by pair.
#include "heed/engines/softmax/seen_keys.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <span>

namespace heed::softmax {
namespace {

// Returns the bits of the 64 keys from `begin` on that are inside an interval.
uint64_t BitsOf(const Interval& keys, int64_t begin) {
  const Interval own = Intersect(keys, {begin, begin + BlockSparseMask::kKeys});
  return own.empty() ? 0 : ~uint64_t{0} >> (BlockSparseMask::kKeys - own.size()) << (own.begin - begin);
}

// Returns the bits of the keys that a placed pattern keeps. The pattern's tiles count from key 0, so 64 keys may be in
// two of them.
uint64_t KeptBits(const Sequence& s, int64_t head, int64_t query, int64_t begin) {
  const std::span<const MaskTile> list = s.kept->Of(s.kept_batch, head, query);
  const int64_t first = begin / BlockSparseMask::kKeys, shift = begin % BlockSparseMask::kKeys;
  uint64_t bits = 0;
  for (auto at = std::ranges::lower_bound(list, first, {}, &MaskTile::tile); at != list.end() && at->tile <= first + 1;
       ++at) {
    const uint64_t word = s.kept->WordOf(*at, query);
    if (at->tile == first) bits |= word >> shift;
    if (at->tile == first + 1 && shift > 0) bits |= word << (BlockSparseMask::kKeys - shift);
  }
  return bits;
}

}  // namespace

uint64_t SeenBits(const Problem& p, const Sequence& s, int64_t head, int64_t query, const KeyRuns& runs,
                  int64_t begin) {
  uint64_t bits = BitsOf(runs.first, begin) | BitsOf(runs.second, begin);
  if (bits != 0 && s.kept != nullptr) bits &= KeptBits(s, head, query, begin);
  const auto drop_unless = [&](const auto& keeps) {
    for (uint64_t left = bits; left != 0; left &= left - 1) {
      if (!keeps(begin + std::countr_zero(left))) bits &= ~(left & -left);
    }
  };
  const auto first_of = [&](const Pairs& pairs) {
    return s.batch * pairs.batch_stride + head * pairs.head_stride + (s.first_q + query) * pairs.query_stride;
  };
  if (!p.segments_q.empty()) {
    const int32_t own = p.segments_q[static_cast<size_t>(s.batch * p.segments_q_stride + s.first_q + query)];
    const int32_t* const ids = p.segments_k.data() + s.batch * p.segments_k_stride;
    drop_unless([&](int64_t key) { return own >= 0 && ids[key] == own; });
  }
  if (p.mask.data != nullptr) {
    const uint8_t* const row = static_cast<const uint8_t*>(p.mask.data) + first_of(p.mask);
    drop_unless([&](int64_t key) { return row[key * p.mask.key_stride] != 0; });
  }
  if (p.bias.data != nullptr) {
    const int64_t row = first_of(p.bias);
    drop_unless([&](int64_t key) {
      const double bias = LoadAsDouble(p.bias.dtype, p.bias.data, row + key * p.bias.key_stride);
      // A bias is added in f32, where numbers below the least finite one are -inf and so a mask.
      return p.dtype == DType::kF64 ? bias != -std::numeric_limits<double>::infinity()
                                    : static_cast<float>(bias) != -std::numeric_limits<float>::infinity();
    });
  }
  if (p.relative_bias.present()) {
    drop_unless([&](int64_t key) {
      return p.relative_bias.At(head, s.start + query - key) != -std::numeric_limits<double>::infinity();
    });
  }
  return bits;
}

}  // namespace heed::softmax
