// RingKVCache: the newest tokens of each sequence and its first ones, for sliding windows
// that never run out of memory.
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
  kAbsolute,  // a key is turned when it is appended, by its position in the sequence
  kCache,     // keys are kept as they are and turned for every Attend(), by where they are
              // in the ring: angles stay within those of sink_tokens + window positions
};

// Every token keeps its absolute position: lengths count all tokens that were ever
// appended, and view() has them in pages of 64 at those positions. Pages between the sinks
// and the window are given back. After an append to a sequence of n tokens, what its first
// new row sees is there and all that follows, until the next append:
//
//   [0, sink_tokens) and [max(0, n - window + 1), length)
//
// first_kept of the view is where the second run begins. No append moves it back.
//
// A sequence holds pages for window - 1 + (tokens of the last append) + sink_tokens tokens
// and at most three partly used ones, and its table 8 bytes for every 64 tokens that it has
// ever had, at most 12 with the room to grow.
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

    // As KVCache's, with RingPositions::kAbsolute.
    //
    // With kCache, the kept tokens count as if they were a text of their own: sinks first,
    // then the window, oldest first. The row at position p sees, S being sink_tokens and W
    // window, sinks and the last W tokens, and among these key j is at
    //
    //   index(p, j) = j                              j < S
    //                 S + j - max(S, p - W + 1)      S <= j <= p
    //
    // It is turned by that, and the query by index(p, p) = min(p, S + W - 1). What comes out
    // depends on differences alone: p - j in the window, and for a sink min(p, S + W - 1) - j,
    // however far the text has gone on. Every row of an append of several tokens has its own
    // such indices, as if it had come alone. StreamingLLM's scheme: Xiao et al.,
    // arXiv:2309.17453.
    std::optional<CacheRotary> rotary = {};
    RingPositions positions = RingPositions::kAbsolute;  // kCache: with rotary only
  };

  // An empty cache. Throws InvalidArgument for an option outside what is said above and in
  // CacheRotary, and for pages of 2^59 bytes or more.
  explicit RingKVCache(const Options& options);

  Options options() const;

  // As KVCache::Append, without a capacity. A sequence to which nothing is appended lets go
  // of what its next row will not see, too.
  void Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths = {});

  // As KVCacheBase::Trim, which also applies, but only to a length L whose next row would
  // find all that it sees: while nothing is gone, any; then L <= sink_tokens, or L >=
  // first_kept + window - 1, which the length before the last append always is. Otherwise
  // InvalidArgument.
  void Trim(std::span<const int64_t> lengths) { KVCacheBase::Trim(lengths); }

  // As KVCache::Fork and KVCache::Load. A file may hold sequences of 2^30 tokens together,
  // gone ones included.
  RingKVCache Fork() const;
  static RingKVCache Load(const std::string& path, int64_t max_bytes = -1);

 private:
  using KVCacheBase::KVCacheBase;
};

}  // namespace heed

#endif  // HEED_STATE_RING_KV_CACHE_H_
