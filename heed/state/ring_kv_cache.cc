// RingKVCache: pages of 64 tokens, which Pages releases when no row sees them.
#include "heed/state/ring_kv_cache.h"

#include <memory>

#include "heed/state/pages_internal.h"

namespace heed {

RingKVCache::RingKVCache(const Options& o)
    : KVCacheBase(std::make_unique<Pages>(PagesOptions{.kind = CacheKind::kRing,
                                                       .batch = o.batch,
                                                       .heads = o.heads,
                                                       .dim = o.dim,
                                                       .value_dim = o.value_dim == 0 ? o.dim : o.value_dim,
                                                       .window = o.window,
                                                       .sink_tokens = o.sink_tokens,
                                                       .dtype = o.dtype,
                                                       .rotary = o.rotary,
                                                       .rotated_in_cache = o.positions == RingPositions::kCache})) {}

RingKVCache::Options RingKVCache::options() const {
  const PagesOptions& o = pages_->options();
  return {o.batch,     o.heads,  o.dim,
          o.value_dim, o.window, o.sink_tokens,
          o.dtype,     o.rotary, o.rotated_in_cache ? RingPositions::kCache : RingPositions::kAbsolute};
}

void RingKVCache::Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths) {
  pages_->Append(k, v, lengths);
}

RingKVCache RingKVCache::Fork() const { return RingKVCache(pages_->Fork()); }

RingKVCache RingKVCache::Load(const std::string& path, int64_t max_bytes) {
  return RingKVCache(LoadPages(path, CacheKind::kRing, max_bytes));
}

}  // namespace heed
