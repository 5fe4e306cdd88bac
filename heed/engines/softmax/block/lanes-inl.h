// Per-lane data of the query rows for the passes over a tile of logits (a query per lane), and the part of the tile
// that a pass is applied to.
//
// Compiled once per SIMD target. A tile is s[key][lane], in cache.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_LANES_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_LANES_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

// Per-lane data of a block's rows. Lanes beyond the last row see no key.
template <class T, size_t W>
struct Lanes {
  using TI = hwy::MakeSigned<T>;
  HWY_ALIGN TI first_begin[W], first_end[W], second_begin[W], second_end[W];
  HWY_ALIGN TI segment[W];
  HWY_ALIGN uint32_t position_low[W], head_row[W];  // dropout counter words
  HWY_ALIGN T slope[W];
  HWY_ALIGN TI relative_head[W];  // where the head's part of the relative bias begins
  int64_t position[W];
  const void* bias[W];
  const void* mask[W];
  uint64_t in_order;  // bit c: the rows of vector c are consecutive positions of one head
};

// Keys [begin, end) and vectors [c0, c1) of a tile, whose first key is called `origin`.
struct Run {
  int64_t begin, end;
  size_t c0, c1;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_LANES_INL_H_
