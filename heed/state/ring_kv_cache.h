// RingKVCache: the newest tokens of each sequence and its first ones, for sliding windows with bounded memory.
#ifndef HEED_STATE_RING_KV_CACHE_H_
#define HEED_STATE_RING_KV_CACHE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "heed/core/dtype.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/state/cache_rotary.h"
#include "heed/state/kv_cache_base.h"

namespace heed {

enum class RingPositions {
  kAbsolute,  // rotation of a key when it is appended, by its position in the sequence
  kCache,     // storage of keys without rotation, and rotation in every Attend() by their places
              // in the ring: angles stay within those of sink_tokens + window positions
};

// Every token keeps its absolute position: lengths count all tokens that were ever appended, and view() has them in
// pages of 64 at those positions. Pages between the sinks and the window are released. After an append to a sequence of
// n tokens, and until the next one, the tokens that its first new row sees and all later ones are there:
//
//   [0, sink_tokens) and [max(0, n - window + 1), length)
//
// first_kept of the view is the beginning of the second run. No append decreases it.
//
// A sequence holds pages for window - 1 + (tokens of the last append) + sink_tokens tokens and at most three partly
// used ones. Its table has 8 bytes for every 64 tokens that it has ever had, at most 12 with the room to grow.
class HEED_API RingKVCache : public KVCacheBase {
 public:
  struct Options {
    int64_t batch = 1;          // at least 1
    int64_t heads = 1;          // at least 1
    int64_t dim = 1;            // at least 1
    int64_t value_dim = 0;      // 0 is dim
    int64_t window = 1;         // tokens that a row sees, itself included; at least 1
    int64_t sink_tokens = 0;    // first tokens, which are always kept
    DType dtype = DType::kF32;  // f64, f32, bf16 or f16

    // With RingPositions::kAbsolute rotary is defined as in KVCache.
    //
    // With kCache, the kept tokens are numbered as a sequence of their own: sinks first, then the window, oldest first.
    // Let S be sink_tokens and W the window. The row at position p sees the sinks and the last W tokens, among which
    // key j has the index
    //
    //   index(p, j) = j                              j < S
    //                 S + j - max(S, p - W + 1)      S <= j <= p
    //
    // The key is rotated by this index, and the query by index(p, p) = min(p, S + W - 1). The result depends on
    // differences alone: p - j in the window, and min(p, S + W - 1) - j for a sink, however long the sequence is. Every
    // row of an append of several tokens has its own indices, as if it had been appended alone. This is StreamingLLM's
    // scheme: Xiao et al., arXiv:2309.17453.
    std::optional<CacheRotary> rotary = {};
    RingPositions positions = RingPositions::kAbsolute;  // kCache: with rotary only
  };

  // An empty cache. Throws InvalidArgument for an option outside what is said above and in CacheRotary, and for pages
  // of 2^59 bytes or more.
  explicit RingKVCache(const Options& options);

  Options options() const;

  // Appends rows under the rules of KVCache::Append, without a capacity. A sequence to which nothing is appended
  // releases the tokens that its next row will not see, too.
  void Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths = {});

  // Shortens sequences under the rules of KVCacheBase::Trim, but only to a length L whose next row finds every token
  // that it sees: any length while no token is released; then L <= sink_tokens, or L >= first_kept + window - 1, which
  // always holds for the length before the last append. Otherwise throws InvalidArgument.
  void Trim(std::span<const int64_t> lengths) { KVCacheBase::Trim(lengths); }

  // Both follow the rules of KVCache. A file may hold sequences of 2^30 tokens together, released ones included.
  RingKVCache Fork() const;
  static RingKVCache Load(const std::string& path, int64_t max_bytes = -1);

 private:
  using KVCacheBase::KVCacheBase;
};

}  // namespace heed

#endif  // HEED_STATE_RING_KV_CACHE_H_
