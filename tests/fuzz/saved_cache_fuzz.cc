// Any bytes as a saved cache: a FileError of one line, or a cache to which queries attend, and which is equal after
// being saved and loaded again.
#include <cstdint>
#include <span>
#include <string_view>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/scratch.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 20, kMaxElements = int64_t{1} << 12;

attention::Options OptionsFor(const RingKVCache& cache) {
  attention::Options options;
  options.window = {cache.options().window - 1, 0};
  options.sink_tokens = cache.options().sink_tokens;
  return options;
}
attention::Options OptionsFor(const KVCacheBase&) { return {}; }

template <class Cache>
void Use(const Cache& cache) {
  const KVView view = cache.view();
  const double elements = static_cast<double>(view.batch) * static_cast<double>(view.heads) *
                          static_cast<double>(view.dim + view.value_dim);
  if (elements > static_cast<double>(kMaxElements)) return;  // a cache without rows may have any sizes
  Buffer q(view.dtype, {view.batch, 1, view.heads, view.dim});
  q.FillNormal(1);
  const Buffer o(view.dtype, {view.batch, 1, view.heads, view.value_dim});
  attention::Options options = OptionsFor(cache);
  options.causal = true;
  options.scale = 0.5;
  Context ctx(1);
  attention::Attend(ctx, view, q.view(), options, {o.view(), {}});
  if (!view.sketch.present) return;
  certified_attention::Options certified;
  certified.epsilon = 0.5;
  certified_attention::Attend(ctx, view, q.view(), certified, {o.view(), {}, {}, {}});
}

template <class Cache>
void Check(const Scratch& file) {
  const Cache cache = Cache::Load(file.path(), kMaxBytes);
  Use(cache);
  static const Scratch saved("_saved"), again("_again");
  cache.Save(saved.path());
  const Cache same = Cache::Load(saved.path(), kMaxBytes);
  Use(same);
  same.Save(again.path());
  Require(saved.Read() == again.Read(), "a cache changes in a file");
}

void Run(std::span<const uint8_t> bytes) {
  static const Scratch file("_any");
  file.Write(bytes);
  try {
    switch (KindOfSavedCache(file.path())) {
      case CacheKind::kKV: return Check<KVCache>(file);
      case CacheKind::kRing: return Check<RingKVCache>(file);
      case CacheKind::kLatent: return Check<LatentKVCache>(file);
    }
  } catch (const FileError& e) {
    Require(std::string_view(e.what()).starts_with(file.path() + ": "), "no file named");
    CheckMessage(e.what());
  }
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({data, size});
  return 0;
}
