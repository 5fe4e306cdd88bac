// LatentKVCache: one head of Pages whose values are the first columns of its keys.
#include "heed/state/latent_kv_cache.h"

#include <memory>
#include <string>

#include "heed/core/error.h"
#include "heed/state/pages_internal.h"

namespace heed {
namespace {

PagesOptions ToPages(const LatentKVCache::Options& o) {
  // Pages does not know the names `latent` and `rope`, so it could not name them in a message.
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value >= least) return;
    throw InvalidArgument(std::string("LatentKVCache: ") + name + " is " + std::to_string(value) +
                          ", expected at least " + std::to_string(least));
  };
  at_least("latent", o.latent, 1);
  at_least("rope", o.rope, 0);
  PagesOptions options;
  options.kind = CacheKind::kLatent;
  options.batch = o.batch;
  if (__builtin_add_overflow(o.latent, o.rope, &options.dim)) {
    throw InvalidArgument(
        "LatentKVCache: latent + rope is 2^63 or more, expected fewer "
        "than 2^59 bytes in a row");
  }
  options.value_dim = o.latent;
  options.capacity = o.capacity;
  options.page = o.page;
  options.dtype = o.dtype;
  return options;
}

}  // namespace

LatentKVCache::LatentKVCache(const Options& options) : KVCacheBase(std::make_unique<Pages>(ToPages(options))) {}

LatentKVCache::Options LatentKVCache::options() const {
  const PagesOptions& o = pages_->options();
  return {o.batch, o.value_dim, o.dim - o.value_dim, o.capacity, o.page, o.dtype};
}

void LatentKVCache::Append(const ConstTensorView& rows, std::span<const int64_t> lengths) {
  if (rows.present() && rows.rank() != 3) {
    throw InvalidArgument("LatentKVCache::Append: rows has shape " + rows.ShapeString() +
                          ", expected rank 3: [B, T, latent + rope]");
  }
  ConstTensorView heads;
  if (rows.present()) {
    heads = ConstTensorView(rows.data(), rows.dtype(), {rows.size(0), rows.size(1), 1, rows.size(2)},
                            {rows.stride(0), rows.stride(1), 0, rows.stride(2)}, rows.device());
  }
  pages_->Append(heads, {}, lengths);
}

LatentKVCache LatentKVCache::Fork() const { return LatentKVCache(pages_->Fork()); }

LatentKVCache LatentKVCache::Share(const LatentKVCache& prefix, int64_t batch) {
  return LatentKVCache(prefix.pages_->Share(batch));
}

int64_t LatentKVCache::shared_prefix() const { return pages_->shared_prefix(); }

LatentKVCache LatentKVCache::Load(const std::string& path, int64_t max_bytes) {
  return LatentKVCache(LoadPages(path, CacheKind::kLatent, max_bytes));
}

}  // namespace heed
