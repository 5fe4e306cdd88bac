// KVCache: options, and pages of other libraries. The rest is Pages.
#include "heed/state/kv_cache.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/mechanism/check_internal.h"
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

// A pool as [pages, tokens, H, D].
ConstTensorView CheckPool(const char* name, const ConstTensorView& pool, bool heads_first,
                          const PagesOptions& o, int64_t dim) {
  const std::string what = name;
  if (!pool.present()) Fail(what + " is absent, expected a tensor");
  if (pool.dtype() != o.dtype) {
    Fail(what + " has dtype " + Name(pool.dtype()) + ", expected " + Name(o.dtype));
  }
  const int heads = heads_first ? 1 : 2;
  if (pool.rank() != 4 || pool.size(heads) != o.heads || pool.size(3) != dim ||
      pool.size(3 - heads) < 1) {
    const std::string H = std::to_string(o.heads);
    Fail(what + " has shape " + pool.ShapeString() + ", expected [pages," +
         (heads_first ? H + ",tokens" : "tokens," + H) + "," + std::to_string(dim) +
         "] with at least one token");
  }
  mechanism::CheckReadable(kImport, name, pool);
  return ConstTensorView(
      pool.data(), pool.dtype(),
      {pool.size(0), pool.size(3 - heads), pool.size(heads), pool.size(3)},
      {pool.stride(0), pool.stride(3 - heads), pool.stride(heads), pool.stride(3)});
}

void CheckList(const char* name, const ConstTensorView& list, int64_t least, bool exact) {
  const std::string what = name;
  if (!list.present()) Fail(what + " is absent, expected a tensor");
  if (list.dtype() != DType::kI32 && list.dtype() != DType::kI64) {
    Fail(what + " has dtype " + Name(list.dtype()) + ", expected i32 or i64");
  }
  if (list.rank() != 1 || list.size(0) < least || (exact && list.size(0) != least)) {
    Fail(what + " has shape " + list.ShapeString() + ", expected [" +
         std::to_string(least) + "]" + (exact ? "" : " or longer"));
  }
  mechanism::CheckReadable(kImport, name, list);
}

// Entry i of a list, which must be from `least` to `most`.
int64_t Entry(const char* name, const ConstTensorView& list, int64_t i, int64_t least,
              int64_t most) {
  const int64_t value = LoadAsInt64(list.dtype(), list.data(), i * list.stride(0));
  if (value < least || value > most) {
    Fail(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) +
         ", expected " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

// One page of a pool: [tokens, H, D].
ConstTensorView PageOf(const ConstTensorView& pool, int64_t page, int64_t tokens) {
  const ConstTensorView one = pool.Slice(0, page, page + 1).Slice(1, 0, tokens);
  return ConstTensorView(one.data(), one.dtype(), one.sizes().subspan(1),
                         one.strides().subspan(1));
}

}  // namespace

KVCache::KVCache(const Options& options)
    : KVCacheBase(std::make_unique<Pages>(ToPages(options))) {}

KVCache::Options KVCache::options() const {
  const PagesOptions& o = pages_->options();
  return {o.batch, o.heads, o.dim,   o.value_dim,
          o.capacity, o.page, o.dtype, o.quantized ? Quantize::kInt8 : Quantize::kNone,
          o.rotary, o.log_decay_heads, o.sketch ? Sketch::kInt8 : Sketch::kNone};
}

void KVCache::Append(const ConstTensorView& k, const ConstTensorView& v,
                     std::span<const int64_t> lengths, const ConstTensorView& log_decay) {
  pages_->Append(k, v, lengths, log_decay);
}

KVCache KVCache::Fork() const { return KVCache(pages_->Fork()); }

KVCache KVCache::Share(const KVCache& prefix, int64_t batch) {
  return KVCache(prefix.pages_->Share(batch));
}

int64_t KVCache::shared_prefix() const { return pages_->shared_prefix(); }

KVCache KVCache::Import(const Options& options, const BlockTables& tables) {
  if (options.log_decay_heads != 0) {
    Fail("log_decay_heads is " + std::to_string(options.log_decay_heads) +
         ", expected 0: tables have no log decays");
  }
  auto pages = std::make_unique<Pages>(ToPages(options));
  const PagesOptions& o = pages->options();
  const ConstTensorView k =
      CheckPool("k_pool", tables.k_pool, tables.heads_first, o, o.dim);
  const ConstTensorView v =
      CheckPool("v_pool", tables.v_pool, tables.heads_first, o, o.value_dim);
  if (v.size(0) != k.size(0) || v.size(1) != k.size(1)) {
    Fail("v_pool has shape " + tables.v_pool.ShapeString() + ", expected " +
         std::to_string(k.size(0)) + " pages of " + std::to_string(k.size(1)) +
         " tokens as in k_pool");
  }
  CheckList("indptr", tables.indptr, o.batch + 1, true);
  CheckList("indices", tables.indices, 0, false);
  CheckList("last_page_len", tables.last_page_len, o.batch, true);
  const int64_t tokens = k.size(1), num_indices = tables.indices.size(0);

  // Where each sequence's pages begin, and all that they will need, before any row is read.
  std::vector<int64_t> begins{Entry("indptr", tables.indptr, 0, 0, 0)}, lengths;
  for (int64_t b = 0; b < o.batch; ++b) {
    const int64_t begin = begins.back();
    begins.push_back(Entry("indptr", tables.indptr, b + 1, begin, num_indices));
    for (int64_t i = begin; i < begins.back(); ++i) {
      Entry("indices", tables.indices, i, 0, k.size(0) - 1);
    }
    lengths.push_back(0);
    if (begins.back() == begin) continue;
    const int64_t last = Entry("last_page_len", tables.last_page_len, b, 1, tokens);
    if (__builtin_mul_overflow(begins.back() - begin - 1, tokens, &lengths.back()) ||
        __builtin_add_overflow(lengths.back(), last, &lengths.back())) {
      Fail("sequence " + std::to_string(b) + " would have 2^63 tokens, expected fewer");
    }
  }
  Appending appending(*pages, kImport, lengths);
  for (int64_t b = 0; b < o.batch; ++b) {
    const size_t s = static_cast<size_t>(b);
    for (int64_t i = begins[s], token = 0; i < begins[s + 1]; ++i, token += tokens) {
      const int64_t page = Entry("indices", tables.indices, i, 0, k.size(0) - 1);
      const int64_t n = std::min(tokens, lengths[s] - token);
      appending.Write(b, token, PageOf(k, page, n), PageOf(v, page, n));
    }
  }
  appending.Commit();
  return KVCache(std::move(pages));
}

KVCache KVCache::Load(const std::string& path, int64_t max_bytes) {
  return KVCache(LoadPages(path, CacheKind::kKV, max_bytes));
}

}  // namespace heed
