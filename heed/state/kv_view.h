// What attention sees of a cache of keys and values: where each row lies, and nothing of
// who owns it.
//
// Row t of key head h of sequence b, a token's key, is in page p = pages[b][t / page_tokens],
// `dim` elements from
//
//   p + key.begin + h key.head_stride + (t % page_tokens) key.token_stride
//
// in bytes, and its value in the same way, `value_dim` elements. A cache whose memory is one
// piece per sequence has one page of that many tokens. Entries of `pages` for tokens at or
// beyond a sequence's length are never read, nor are those of pages that a ring has let go.
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

// What a cache with a sketch keeps of its keys, as they are stored, in blocks of 64 tokens, of which none lies in two
// pages. A block of a head is one piece of memory:
//
//   bytes  u8  [dim / 4, rounded up][64][4]   128 + n, where n = key / step is rounded and -127 <= n <= 127
//   step   f32 [64]                           of each token, as a quantised cache has it
//   error  f32 [64]                           at least the Euclidean norm of key - step n
//   min, max, mean  f32 [dim] each            of the 64 keys; indeterminate until all are there
//
// A key with NaN or infinity has n of 0, and step and error that are infinite. min and max are exact, mean is rounded
// once; a NaN makes all three NaN in its channel.
struct SketchBlocks {
  static constexpr int64_t kTokens = 64;

  bool present = false;
  int64_t begin = 0, lane_stride = 0, lane_heads = 1, head_stride = 0, block_stride = 0;  // in a page, bytes
  int64_t step = 0, error = 0, min = 0, max = 0, mean = 0;                                // in a block, bytes

  // Where the block of the token that comes `in_page`-th in a page begins.
  const std::byte* At(const std::byte* page, int64_t head, int64_t in_page) const {
    return page + begin + head / lane_heads * lane_stride + head % lane_heads * head_stride +
           in_page / kTokens * block_stride;
  }
};

struct KVView {
  DType dtype = DType::kF32;  // of the rows; of queries, where the rows are quantised
  int64_t batch = 0, heads = 0, dim = 0, value_dim = 0;
  int64_t page_tokens = 1;
  PageRows key, value;

  // Quantised rows are int8, and an element is its row's scale times that: one f32 per row,
  // addressed as rows are.
  bool quantized = false;
  PageRows key_scale, value_scale;

  // Log decays of as many query heads, a multiple of `heads`; 0: none. f64 beside f64, else f32,
  // addressed as keys are: those of a key head's query heads are one row.
  int64_t log_decay_heads = 0;
  PageRows log_decay;

  const std::byte* const* const* pages = nullptr;  // [batch]
  std::span<const int64_t> lengths;                // rows of each sequence, [batch]
  std::span<const int64_t> appended;               // of these, by the last Append()

  SketchBlocks sketch;

  // What certified attention remembers of each sequence and head, [batch, heads]: certified_attention.h. It is there as
  // soon as rows are, and may change while a cache is looked at.
  uint8_t* certified_memory = nullptr;

  // Tokens that are the same rows in all sequences: attention reads them once for all.
  int64_t shared_prefix = 0;

  // In a ring, tokens in [sink_tokens, first_kept[b]) are gone. Empty: none are.
  std::span<const int64_t> first_kept;
  int64_t sink_tokens = 0;
  int64_t window = 0;  // tokens that a row sees, itself included

  // How queries are to be turned, null: not at all. Rows of keys have been turned by their
  // positions already, unless `turned_in_cache`: then both are to be turned by their places in
  // what the ring keeps, as ring_kv_cache.h says.
  const CacheRotary* rotary = nullptr;
  bool turned_in_cache = false;
};

}  // namespace heed

#endif  // HEED_STATE_KV_VIEW_H_
