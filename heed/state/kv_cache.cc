// KVCache: options, and block tables of other libraries. Pages implements everything else.
#include "heed/state/kv_cache.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "heed/core/error.h"
#include "heed/state/block_tables_internal.h"
#include "heed/state/pages_internal.h"

namespace heed {
namespace {

constexpr char kImport[] = "KVCache::Import";

PagesOptions ToPages(const KVCache::Options& o) {
  PagesOptions options;
  options.kind = CacheKind::kKV;
  options.batch = o.batch;
  options.heads = o.heads;
  options.dim = o.dim;
  options.value_dim = o.value_dim == 0 ? o.dim : o.value_dim;
  options.capacity = o.capacity;
  options.page = o.page;
  options.dtype = o.dtype;
  options.quantized = o.quantize == Quantize::kInt8;
  options.rotary = o.rotary;
  options.log_decay_heads = o.log_decay_heads;
  options.sketch = o.sketch == Sketch::kInt8;
  return options;
}

[[noreturn]] void Fail(const std::string& what) { throw InvalidArgument(std::string(kImport) + ": " + what); }

// One page of a pool, [tokens, H, D].
ConstTensorView PageOf(const ConstTensorView& pool, int64_t page, int64_t tokens) {
  const ConstTensorView one = pool.Slice(0, page, page + 1).Slice(1, 0, tokens);
  return ConstTensorView(one.data(), one.dtype(), one.sizes().subspan(1), one.strides().subspan(1));
}

}  // namespace

KVCache::KVCache(const Options& options) : KVCacheBase(std::make_unique<Pages>(ToPages(options))) {}

KVCache::Options KVCache::options() const {
  const PagesOptions& o = pages_->options();
  return {o.batch,
          o.heads,
          o.dim,
          o.value_dim,
          o.capacity,
          o.page,
          o.dtype,
          o.quantized ? Quantize::kInt8 : Quantize::kNone,
          o.rotary,
          o.log_decay_heads,
          o.sketch ? Sketch::kInt8 : Sketch::kNone};
}

void KVCache::Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths,
                     const ConstTensorView& log_decay) {
  pages_->Append(k, v, lengths, log_decay);
}

KVCache KVCache::Fork() const { return KVCache(pages_->Fork()); }

KVCache KVCache::Share(const KVCache& prefix, int64_t batch) { return KVCache(prefix.pages_->Share(batch)); }

int64_t KVCache::shared_prefix() const { return pages_->shared_prefix(); }

KVCache KVCache::Import(const Options& options, const BlockTables& tables) {
  if (options.log_decay_heads != 0) {
    Fail("log_decay_heads is " + std::to_string(options.log_decay_heads) + ", expected 0: tables have no log decays");
  }
  auto pages = std::make_unique<Pages>(ToPages(options));
  const PagesOptions& o = pages->options();
  const CheckedTables checked = CheckTables(kImport, tables, {o.dtype, o.batch, o.heads, o.dim, o.value_dim});
  const int64_t tokens = checked.page_tokens();
  Appending appending(*pages, kImport, checked.lengths);
  for (int64_t b = 0; b < o.batch; ++b) {
    const size_t s = static_cast<size_t>(b);
    for (int64_t i = checked.begins[s], token = 0; i < checked.begins[s + 1]; ++i, token += tokens) {
      const int64_t page = checked.pages[static_cast<size_t>(i)], n = std::min(tokens, checked.lengths[s] - token);
      appending.Write(b, token, PageOf(checked.k, page, n), PageOf(checked.v, page, n));
    }
  }
  appending.Commit();
  return KVCache(std::move(pages));
}

KVCache KVCache::Load(const std::string& path, int64_t max_bytes) {
  return KVCache(LoadPages(path, CacheKind::kKV, max_bytes));
}

}  // namespace heed
