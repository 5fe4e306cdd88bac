// LatentKVCache: one row per token, which is both key and value.
#include "heed/state/latent_kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "heed/state/cache_model_case.h"

namespace heed {
namespace {

using testing::ElementsAre;

using List = std::vector<int64_t>;

TEST(LatentKVCacheTest, ValuesHaveTheLayoutOfKeys) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    LatentKVCache cache({.batch = 2, .latent = 6, .rope = 3, .page = 5, .dtype = dtype});
    CacheModel model(cache.options());
    Random random(1);
    AppendRandom(random, cache, model, List{7, 2});
    const KVView view = cache.view();
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    EXPECT_EQ(cache.kind(), CacheKind::kLatent);
    EXPECT_EQ(view.heads, 1);
    EXPECT_EQ(view.dim, 9);
    EXPECT_EQ(view.value_dim, 6);
    EXPECT_EQ(view.key.token_stride, 9 * size);
    EXPECT_EQ(view.value.begin, view.key.begin);
    EXPECT_EQ(view.value.head_stride, view.key.head_stride);
    EXPECT_EQ(view.value.token_stride, view.key.token_stride);
    EXPECT_EQ(cache.nbytes(), 3 * ((5 * 9 * size + 63) / 64 * 64));
    EXPECT_EQ(Difference(view, model), "");
  }
}

TEST(LatentKVCacheTest, OptionsComeBack) {
  const LatentKVCache cache({.batch = 2, .latent = 6, .rope = 3, .capacity = 30, .page = 0, .dtype = DType::kBF16});
  const LatentKVCache::Options o = cache.options();
  EXPECT_EQ(o.batch, 2);
  EXPECT_EQ(o.latent, 6);
  EXPECT_EQ(o.rope, 3);
  EXPECT_EQ(o.capacity, 30);
  EXPECT_EQ(o.page, 0);
  EXPECT_EQ(o.dtype, DType::kBF16);
  EXPECT_EQ(cache.view().page_tokens, 30);
}

TEST(LatentKVCacheTest, ForksAndSharesAndTrims) {
  LatentKVCache cache({.latent = 4, .rope = 2, .page = 4});
  CacheModel model(cache.options());
  Random random(1);
  AppendRandom(random, cache, model, List{10});
  LatentKVCache fork = cache.Fork();
  CacheModel fork_model = model;
  AppendRandom(random, fork, fork_model, List{3});
  LatentKVCache shared = LatentKVCache::Share(cache, 3);
  CacheModel shared_model = model.Share(3);
  EXPECT_EQ(shared.shared_prefix(), 10);
  EXPECT_EQ(shared.nbytes(), cache.nbytes());
  AppendRandom(random, shared, shared_model, List{1, 2, 0});
  shared.Trim(List{11, 9, 10});
  shared_model.Trim(List{11, 9, 10});
  EXPECT_EQ(shared.shared_prefix(), 9);
  EXPECT_EQ(Difference(cache.view(), model), "");
  EXPECT_EQ(Difference(fork.view(), fork_model), "");
  EXPECT_EQ(Difference(shared.view(), shared_model), "");
}

}  // namespace
}  // namespace heed
