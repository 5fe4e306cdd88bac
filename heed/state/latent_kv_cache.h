// LatentKVCache: what multi-head latent attention keeps of a token, one row for all heads.
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

// A row is `latent` elements, which are the token's value too, and `rope` more that only
// its key has. view() shows one head with dim = latent + rope and value_dim = latent, and
// values that lie where keys do. A page is page (latent + rope) elements.
class HEED_API LatentKVCache : public KVCacheBase {
 public:
  struct Options {
    int64_t batch = 1;          // at least 1
    int64_t latent = 1;         // at least 1
    int64_t rope = 0;           // at least 0
    int64_t capacity = -1;      // as KVCache's
    int64_t page = 64;          // as KVCache's
    DType dtype = DType::kF32;  // f64, f32, bf16 or f16
  };

  // An empty cache. Throws InvalidArgument as KVCache's constructor does.
  explicit LatentKVCache(const Options& options);

  Options options() const;

  // Adds rows [0, lengths[b]) of rows[b], all where `lengths` is empty: as KVCache::Append.
  //
  //   rows     [B, T, latent + rope]  dtype of the cache, any strides
  //   lengths  [B]                    from 0 to T
  void Append(const ConstTensorView& rows, std::span<const int64_t> lengths = {});

  // As KVCache's.
  LatentKVCache Fork() const;
  static LatentKVCache Share(const LatentKVCache& prefix, int64_t batch);
  int64_t shared_prefix() const;
  static LatentKVCache Load(const std::string& path, int64_t max_bytes = -1);

 private:
  using KVCacheBase::KVCacheBase;
};

}  // namespace heed

#endif  // HEED_STATE_LATENT_KV_CACHE_H_
