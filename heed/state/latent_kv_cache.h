// LatentKVCache: the cache of multi-head latent attention, which keeps one row per token for all heads.
#ifndef HEED_STATE_LATENT_KV_CACHE_H_
#define HEED_STATE_LATENT_KV_CACHE_H_

#include <cstdint>
#include <span>
#include <string>

#include "heed/core/dtype.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"
#include "heed/state/kv_cache_base.h"

namespace heed {

// A row has `latent` elements, which are also the token's value, and `rope` more that belong to its key alone. view()
// has one head with dim = latent + rope and value_dim = latent, whose values are at the addresses of its keys. A page
// has page (latent + rope) elements.
class HEED_API LatentKVCache : public KVCacheBase {
 public:
  struct Options {
    int64_t batch = 1;          // at least 1
    int64_t latent = 1;         // at least 1
    int64_t rope = 0;           // at least 0
    int64_t capacity = -1;      // tokens per sequence, at least 1; -1: grows without bound
    int64_t page = 64;          // tokens; 0: contiguous, one page of `capacity` per sequence
    DType dtype = DType::kF32;  // f64, f32, bf16 or f16
  };

  // An empty cache. Throws InvalidArgument as KVCache's constructor does.
  explicit LatentKVCache(const Options& options);

  Options options() const;

  // Appends rows [0, lengths[b]) of rows[b], all if `lengths` is empty, under the rules of KVCache::Append.
  //
  //   rows     [B, T, latent + rope]  dtype of the cache, any strides
  //   lengths  [B]                    from 0 to T
  void Append(const ConstTensorView& rows, std::span<const int64_t> lengths = {});

  // Fork(), Share() and Load() are defined as in KVCache.
  LatentKVCache Fork() const;
  static LatentKVCache Share(const LatentKVCache& prefix, int64_t batch);
  int64_t shared_prefix() const;
  static LatentKVCache Load(const std::string& path, int64_t max_bytes = -1);

 private:
  using KVCacheBase::KVCacheBase;
};

}  // namespace heed

#endif  // HEED_STATE_LATENT_KV_CACHE_H_
