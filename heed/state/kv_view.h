// KVView: a cache of keys and values as attention sees it. It has the address of each row and does not know the owner.
//
// The key of token t in key head h of sequence b is in page p = pages[b][t / page_tokens]. Its `dim` elements begin at
//
//   p + key.begin + h key.head_stride + (t % page_tokens) key.token_stride
//
// in bytes. The token's value has `value_dim` elements, addressed in the same way. A cache with one contiguous block
// per sequence has one page of that many tokens. Entries of `pages` for tokens at or beyond a sequence's length are
// never read, nor are those of pages that a ring has released.
#ifndef HEED_STATE_KV_VIEW_H_
#define HEED_STATE_KV_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "heed/core/dtype.h"
#include "heed/state/cache_rotary.h"

namespace heed {

// Strides in bytes, from the beginning of a page.
struct PageRows {
  int64_t begin = 0, head_stride = 0, token_stride = 0;
};

// The sketch that a cache keeps of its stored keys, in blocks of 64 tokens, none of which spans two pages. A block of a
// head is contiguous:
//
//   bytes  u8  [dim / 4, rounded up][64][4]   128 + n, where n = key / step is rounded and -127 <= n <= 127
//   step   f32 [64]                           of each token, like the scale of a quantised cache
//   error  f32 [64]                           at least the Euclidean norm of key - step n
//   min, max, mean  f32 [dim] each            of the 64 keys; indeterminate until the block is complete
//
// For a key with NaN or infinity n is 0, and step and error are infinite. min and max are exact, mean is rounded once;
// a NaN makes all three NaN in its channel.
struct SketchBlocks {
  static constexpr int64_t kTokens = 64;

  bool present = false;
  int64_t begin = 0, lane_stride = 0, lane_heads = 1, head_stride = 0, block_stride = 0;  // in a page, bytes
  int64_t step = 0, error = 0, min = 0, max = 0, mean = 0;                                // in a block, bytes

  // The address of the block of the token with index `in_page` in its page.
  const std::byte* At(const std::byte* page, int64_t head, int64_t in_page) const {
    return page + begin + head / lane_heads * lane_stride + head % lane_heads * head_stride +
           in_page / kTokens * block_stride;
  }
};

struct KVView {
  DType dtype = DType::kF32;  // dtype of the rows, or of queries if the rows are quantised
  int64_t batch = 0, heads = 0, dim = 0, value_dim = 0;
  int64_t page_tokens = 1;
  PageRows key, value;

  // Quantised rows are int8: an element is this integer times its row's scale. There is one f32 scale per row,
  // addressed like the rows.
  bool quantized = false;
  PageRows key_scale, value_scale;

  // The number of query heads with log decays, a multiple of `heads`; 0: none. They are f64 with f64 and f32 otherwise,
  // and are addressed like keys: the log decays of a key head's query heads are one row.
  int64_t log_decay_heads = 0;
  PageRows log_decay;

  const std::byte* const* const* pages = nullptr;  // [batch]
  std::span<const int64_t> lengths;                // number of rows of each sequence, [batch]
  std::span<const int64_t> appended;               // number of rows that the last Append() added

  SketchBlocks sketch;

  // State of certified attention for each sequence and head, [batch, heads]: certified_attention.h. It exists as soon
  // as there are rows, and may change while a cache is read.
  uint8_t* certified_memory = nullptr;

  // The number of leading tokens whose rows are equal in all sequences: attention reads them once for all.
  int64_t shared_prefix = 0;

  // A ring has released tokens in [sink_tokens, first_kept[b]). Empty: none is released.
  std::span<const int64_t> first_kept;
  int64_t sink_tokens = 0;
  int64_t window = 0;  // tokens that a row sees, itself included

  // Rotary options of queries; null if they are not rotated. Keys have been rotated by their positions already, unless
  // `rotated_in_cache`: then both are rotated by their places in the ring, as ring_kv_cache.h says.
  const CacheRotary* rotary = nullptr;
  bool rotated_in_cache = false;
};

}  // namespace heed

#endif  // HEED_STATE_KV_VIEW_H_
