// Sketches of caches: their content after every change of a cache and in files, and the caches that have none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"
#include "heed/io/safetensors.h"
#include "heed/state/cache_model_case.h"
#include "heed/state/sketch_case.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using List = std::vector<int64_t>;

KVCache::Options Small(DType dtype, int64_t page) {
  return {.batch = 2,
          .heads = 3,
          .dim = 10,
          .capacity = page == 0 ? int64_t{400} : int64_t{-1},
          .page = page,
          .dtype = dtype,
          .sketch = Sketch::kInt8};
}

class SketchTest : public FileTest {
 protected:
  void Append(KVCache& cache, const List& lengths) {
    AppendRandom(random_, cache, model_, lengths);
    Check(cache);
  }
  void Check(const KVCache& cache) { ASSERT_EQ(SketchDifference(cache.view()), ""); }

  Random random_{5};
  CacheModel model_{Small(DType::kF32, 64)};
};

TEST_F(SketchTest, IsOfTheStoredKeysWhateverChangesTheCache) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t page : {0, 64, 192}) {
      SCOPED_TRACE(std::string(Name(dtype)) + ", pages of " + std::to_string(page));
      model_ = CacheModel(Small(dtype, page));
      KVCache cache(Small(dtype, page));
      Append(cache, {130, 5});
      for (int i = 0; i < 70; ++i) Append(cache, {1, 1});
      KVCache fork = cache.Fork();
      CacheModel model = model_;
      cache.Trim(List{100, 64});
      model_.Trim(List{100, 64});
      Check(cache);
      Append(cache, {40, 70});
      Check(fork);
      cache.Reorder(List{1, 1});
      model_.Reorder(List{1, 1});
      Append(cache, {3, 66});
      std::swap(model, model_);
      Append(fork, {0, 20});
      std::swap(model, model_);
      EXPECT_EQ(Difference(cache.view(), model_), "");
      EXPECT_EQ(Difference(fork.view(), model), "");
      Check(cache);
    }
  }
}

TEST_F(SketchTest, IsMadeAgainOfAFile) {
  KVCache::Options one = Small(DType::kF32, 64);
  one.batch = 1;
  KVCache prefix(one);
  model_ = CacheModel(one);
  Append(prefix, {100});
  KVCache cache = KVCache::Share(prefix, 2);
  model_ = model_.Share(2);
  Append(cache, {70, 0});
  cache.Save(Path("x"));
  EXPECT_EQ(SafetensorsFile(Path("x")).metadata().at("sketch"), "int8");
  EXPECT_EQ(SafetensorsFile(Path("x")).entries().size(), 8u);  // keys, values, lengths, but no sketch
  KVCache loaded = KVCache::Load(Path("x"));
  EXPECT_EQ(loaded.options().sketch, Sketch::kInt8);
  EXPECT_EQ(loaded.nbytes(), cache.nbytes());
  EXPECT_EQ(Difference(loaded.view(), model_), "");
  Check(loaded);
  Append(loaded, {30, 30});
  KVCache(KVCache::Options{}).Save(Path("y"));
  EXPECT_EQ(SafetensorsFile(Path("y")).metadata().count("sketch"), 0u);
}

TEST_F(SketchTest, RotatedKeysAreSketchedAsTheyAreStored) {
  KVCache::Options options = Small(DType::kF32, 64);
  options.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  KVCache cache(options);
  const RandomRows x(random_, DType::kF32, /*finite=*/true, {2, 150, 3, 10}, true);
  cache.Append(x.view(), x.view());
  Check(cache);
}

TEST_F(SketchTest, ImportedPagesHaveOne) {
  const RandomRows pool(random_, DType::kF32, /*finite=*/true, {5, 32, 3, 10}, true);
  const List indptr = {0, 3, 5}, indices = {4, 0, 1, 2, 3}, last = {32, 7};
  const auto list = [](const List& x) { return ConstTensorView(x.data(), DType::kI64, {std::ssize(x)}); };
  const KVCache cache =
      KVCache::Import(Small(DType::kF32, 64), {pool.view(), pool.view(), list(indptr), list(indices), list(last)});
  Check(cache);
}

TEST_F(SketchTest, CostsWhatTheHeaderSays) {
  // Three heads of f32 fit into a unit of 64 * 64 * 4 bytes: each has 64 * (64 + 8) + 12 * 64 = 5376.
  for (const auto& [heads, lanes] : {std::pair{1, 3}, {3, 7}, {4, 10}}) {
    KVCache::Options options = {.heads = heads, .dim = 64, .sketch = Sketch::kInt8};
    KVCache cache(options);
    CacheModel model(options);
    AppendRandom(random_, cache, model, List{65});
    EXPECT_EQ(cache.nbytes(), 2 * lanes * 16384);
  }
}

TEST_F(SketchTest, CachesThatCanHaveNoneSayWhy) {
  const auto expect = [](const KVCache::Options& options, const std::string& message) {
    EXPECT_THAT([&] { KVCache cache(options); }, ThrowsMessage<InvalidArgument>(HasSubstr("KVCache: " + message)));
  };
  expect({.dtype = DType::kF64, .sketch = Sketch::kInt8}, "dtype is f64, expected f32, bf16 or f16 with a sketch");
  expect({.quantize = Quantize::kInt8, .sketch = Sketch::kInt8}, "quantize is int8, expected none with a sketch");
  expect({.log_decay_heads = 1, .sketch = Sketch::kInt8}, "log_decay_heads is 1, expected none with a sketch");
  expect({.page = 96, .sketch = Sketch::kInt8}, "page is 96, expected a multiple of 64, or 0 with a sketch");
  expect({.dim = 65537, .sketch = Sketch::kInt8}, "dim is 65537, expected at most 65536 with a sketch");
}

}  // namespace
}  // namespace heed
