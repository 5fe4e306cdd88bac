// Caches in files: the loaded content, the form of the file, and that no file does harm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"
#include "heed/io/safetensors.h"
#include "heed/state/cache_model_case.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

using List = std::vector<int64_t>;
using Parts = FileParts;

KVCache::Options KVOptions(Quantize quantize) {
  return {.batch = 3,
          .heads = 2,
          .dim = 5,
          .value_dim = 3,
          .capacity = 40,
          .page = 4,
          .dtype = DType::kBF16,
          .quantize = quantize};
}

class SavedCacheTest : public FileTest {
 protected:
  std::string path() const { return Path("cache.safetensors"); }

  template <class Function>
  void ExpectFileError(Function&& function, const std::string& message) {
    EXPECT_THAT(function, ThrowsMessage<FileError>(AllOf(StartsWith(path() + ": "), HasSubstr(message))));
  }

  Random random_{11};
};

TEST_F(SavedCacheTest, KVCachesComeBack) {
  for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
    KVCache cache(KVOptions(quantize));
    CacheModel model(cache.options());
    AppendRandom(random_, cache, model, List{7, 0, 9});
    AppendRandom(random_, cache, model, List{2, 0, 0});
    cache.Save(path());
    EXPECT_EQ(KindOfSavedCache(path()), CacheKind::kKV);
    KVCache loaded = KVCache::Load(path());
    const KVCache::Options o = loaded.options();
    EXPECT_EQ(o.value_dim, 3);
    EXPECT_EQ(o.capacity, 40);
    EXPECT_EQ(o.page, 4);
    EXPECT_EQ(o.dtype, DType::kBF16);
    EXPECT_EQ(o.quantize, quantize);
    EXPECT_EQ(loaded.nbytes(), cache.nbytes());
    EXPECT_EQ(Difference(loaded.view(), model), "");
    AppendRandom(random_, loaded, model, List{1, 2, 3});
    EXPECT_EQ(Difference(loaded.view(), model), "");
  }
}

TEST_F(SavedCacheTest, ContiguousCachesComeBack) {
  KVCache cache({.batch = 2, .dim = 4, .capacity = 30, .page = 0});
  CacheModel model(cache.options());
  AppendRandom(random_, cache, model, List{7, 1});
  cache.Save(path());
  const KVCache loaded = KVCache::Load(path());
  EXPECT_EQ(loaded.options().page, 0);
  EXPECT_EQ(loaded.view().page_tokens, 30);
  EXPECT_EQ(Difference(loaded.view(), model), "");
}

TEST_F(SavedCacheTest, RingsComeBackWithTheirGaps) {
  for (const int64_t sinks : {0, 4, 70}) {
    RingKVCache cache({.batch = 3, .dim = 4, .window = 10, .sink_tokens = sinks});
    CacheModel model(cache.options());
    AppendRandom(random_, cache, model, List{300, 5, 0});
    AppendRandom(random_, cache, model, List{30, 2, 0});
    cache.Save(path());
    EXPECT_EQ(KindOfSavedCache(path()), CacheKind::kRing);
    RingKVCache loaded = RingKVCache::Load(path());
    EXPECT_EQ(loaded.options().window, 10);
    EXPECT_EQ(loaded.options().sink_tokens, sinks);
    EXPECT_EQ(loaded.nbytes(), cache.nbytes());
    EXPECT_EQ(Difference(loaded.view(), model), "");
    AppendRandom(random_, loaded, model, List{100, 1, 1});
    EXPECT_EQ(Difference(loaded.view(), model), "");
  }
}

TEST_F(SavedCacheTest, AFileHasTheRowsThatARingKeeps) {
  RingKVCache cache({.dim = 2, .window = 10, .sink_tokens = 4});
  CacheModel model(cache.options());
  AppendRandom(random_, cache, model, List{14});
  AppendRandom(random_, cache, model, List{1});
  cache.Save(path());
  EXPECT_EQ(SafetensorsFile(path()).tensor("first_kept").as<int64_t>()[0], 5);  // token 4 alone is released
  EXPECT_EQ(SafetensorsFile(path()).tensor("k.0").ShapeString(), "[14,1,2]");
  EXPECT_EQ(Difference(RingKVCache::Load(path()).view(), model), "");
}

TEST_F(SavedCacheTest, LatentCachesComeBack) {
  LatentKVCache cache({.batch = 2, .latent = 5, .rope = 2, .page = 4});
  CacheModel model(cache.options());
  AppendRandom(random_, cache, model, List{6, 1});
  cache.Save(path());
  EXPECT_EQ(KindOfSavedCache(path()), CacheKind::kLatent);
  const LatentKVCache loaded = LatentKVCache::Load(path());
  EXPECT_EQ(loaded.options().latent, 5);
  EXPECT_EQ(loaded.options().rope, 2);
  EXPECT_EQ(Difference(loaded.view(), model), "");
}

TEST_F(SavedCacheTest, ASharedPrefixIsThereOnceAndIsSharedAgain) {
  KVCache prefix({.dim = 4, .page = 4});
  CacheModel model(prefix.options());
  AppendRandom(random_, prefix, model, List{10});
  KVCache cache = KVCache::Share(prefix, 3);
  model = model.Share(3);
  AppendRandom(random_, cache, model, List{3, 0, 1});
  cache.Save(path());
  EXPECT_EQ(SafetensorsFile(path()).tensor("k.prefix").ShapeString(), "[10,1,4]");
  EXPECT_EQ(SafetensorsFile(path()).tensor("v.0").ShapeString(), "[3,1,4]");
  KVCache loaded = KVCache::Load(path());
  EXPECT_EQ(loaded.shared_prefix(), 10);
  EXPECT_EQ(loaded.nbytes(), cache.nbytes());
  EXPECT_EQ(loaded.view().pages[0][1], loaded.view().pages[2][1]);
  EXPECT_EQ(Difference(loaded.view(), model), "");
}

TEST_F(SavedCacheTest, TheFileIsAsDocumented) {
  KVCache cache({.heads = 2, .dim = 5, .quantize = Quantize::kInt8});
  const Buffer x(DType::kF32, List{1, 2, 2, 5});
  x.FillConstant(2);
  x.Set({0, 1, 1, 4}, -4);
  cache.Append(x.view(), x.view());
  cache.Save(path());
  const SafetensorsFile file(path());
  const std::map<std::string, std::string> expected = {
      {"heed_cache", "kv"}, {"version", "1"},     {"batch", "1"},        {"heads", "2"},  {"dim", "5"},
      {"value_dim", "5"},   {"capacity", "-1"},   {"page", "64"},        {"window", "0"}, {"sink_tokens", "0"},
      {"dtype", "f32"},     {"quantize", "int8"}, {"shared_prefix", "0"}};
  EXPECT_EQ(file.metadata(), expected);
  EXPECT_EQ(file.entries().size(), 6u);
  EXPECT_EQ(file.tensor("lengths").as<int64_t>()[0], 2);
  EXPECT_EQ(file.tensor("appended").as<int64_t>()[0], 2);
  EXPECT_EQ(file.tensor("v.0").ShapeString(), "[2,2,2]");
  const ConstTensorView k = file.tensor("k.0"), scale = file.tensor("k_scale.0");
  EXPECT_EQ(k.dtype(), DType::kI32);
  const int8_t* const row = k.as<int8_t>() + 3 * 8;
  EXPECT_THAT(std::vector<int>(row, row + 8), ElementsAre(64, 64, 64, 64, -127, 0, 0, 0));
  EXPECT_EQ(scale.ShapeString(), "[2,2]");
  EXPECT_EQ(scale.as<float>()[3], 4.0f / 127);
}

TEST_F(SavedCacheTest, ACacheThatCannotBeWrittenIsAFileError) {
  const KVCache cache(KVCache::Options{});
  EXPECT_THROW(cache.Save(Path("no/such/folder")), FileError);
  EXPECT_THROW(KVCache::Load(Path("none")), FileError);
  EXPECT_THROW(KindOfSavedCache(Path("none")), FileError);
}

TEST_F(SavedCacheTest, WhatIsNotASavedKVCacheIsAFileError) {
  for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
    KVCache cache(KVOptions(quantize));
    CacheModel model(cache.options());
    AppendRandom(random_, cache, model, List{7, 1, 9});
    cache.Save(path());
    const Parts good(path());
    const auto expect = [&](const std::function<void(Parts&)>& spoil, const std::string& message) {
      Parts parts = good;
      spoil(parts);
      parts.Write(path());
      ExpectFileError([&] { KVCache::Load(path()); }, message);
    };
    const auto meta = [&](const char* key, const char* value, const std::string& message) {
      expect([&](Parts& p) { p.metadata[key] = value; }, message);
      expect([&](Parts& p) { p.metadata.erase(key); }, std::string("metadata has no '") + key + "'");
    };
    using P = Parts;
    meta("heed_cache", "x", "metadata 'heed_cache' is 'x', expected kv, ring or latent");
    meta("version", "2", "metadata 'version' is '2', expected 1");
    meta("dtype", "f8", "metadata 'dtype' is 'f8', expected f64, f32, bf16 or f16");
    meta("dtype", "i32", "KVCache: dtype is i32");
    meta("quantize", "int4", "metadata 'quantize' is 'int4', expected none or int8");
    meta("shared_prefix", "-1", "metadata 'shared_prefix' is -1, expected at least 0");
    for (const char* const text : {"", "x", "1x", " 1", "99999999999999999999", "+1"}) {
      meta("heads", text, "metadata 'heads' is '");
    }
    meta("batch", "0", "tensor 'lengths' has shape [3], expected [0]");
    meta("batch", "-1", "tensor 'lengths' has shape [3], expected [-1]");
    meta("batch", "1000000000000", "tensor 'lengths' has shape [3]");
    meta("heads", "0", "KVCache: heads is 0");
    meta("heads", "3", "tensor 'k.0' has shape");
    meta("dim", "-5", "KVCache: dim is -5");
    meta("dim", "9", "tensor 'k.0' has shape");
    meta("dim", "9223372036854775807", "KVCache: a row of");
    meta("value_dim", "0", "KVCache: value_dim is 0");
    meta("capacity", "8", "length of sequence 2 is 9, expected 0 to 8");
    meta("capacity", "0", "KVCache: capacity is 0");
    meta("page", "-3", "KVCache: page is -3");
    meta("page", "100000000000", "expected at most that");
    meta("window", "5", "metadata has options that a cache of kind kv cannot have");
    meta("sink_tokens", "5", "metadata has options that a cache of kind kv cannot have");
    meta("shared_prefix", "2", "length of sequence 1 is 1, expected 2 to 40");
    meta("shared_prefix", "1", "tensor 'k.prefix' is not there");
    const auto missing = [&](const char* name) {
      expect([&](P& p) { p.tensors.erase(name); }, std::string("tensor '") + name + "' is not there");
    };
    for (const char* const name : {"lengths", "appended", "k.0", "v.2"}) missing(name);
    expect([](P& p) { p.Set("lengths", 0, -1); }, "length of sequence 0 is -1, expected 0");
    expect([](P& p) { p.Set("lengths", 2, 41); }, "length of sequence 2 is 41");
    expect(
        [](P& p) {
          p.Set("lengths", 1, 2);
          p.Set("appended", 1, 2);
        },
        "tensor 'k.1' has shape [1,2,");
    expect([](P& p) { p.Set("appended", 1, 2); }, "appended of sequence 1 is 2, expected 0 to 1");
    expect([](P& p) { p.Set("appended", 1, -1); }, "appended of sequence 1 is -1");
    expect([](P& p) { p.Reshape("lengths", DType::kI32, {3}); }, "tensor 'lengths' has dtype i32, expected i64");
    expect([](P& p) { p.Reshape("appended", DType::kI64, {3, 1}); }, "tensor 'appended' has shape [3,1], expected [3]");
    expect([](P& p) { p.Reshape("k.1", DType::kF16, {1, 2, 5}); }, "tensor 'k.1' has dtype f16, expected ");
    if (quantize == Quantize::kNone) {
      expect([](P& p) { p.Reshape("v.1", DType::kBF16, {1, 6}); }, "tensor 'v.1' has shape [1,6], expected [1,2,3]");
      meta("quantize", "int8", "tensor 'k.0' has dtype bf16, expected i32");
      continue;
    }
    missing("k_scale.1");
    missing("v_scale.0");
    meta("dtype", "f64", "KVCache: dtype is f64");
    expect([](P& p) { p.tensors["k.0"].second[3] = '\x80'; }, "tensor 'k.0' has -128, expected -127 to 127");
    expect([](P& p) { p.tensors["v.2"].second[2] = '\x80'; }, "tensor 'v.2' has -128");
    for (const float bad : {0.0f, -1.0f, 1e-40f, INFINITY, NAN}) {
      expect([&](P& p) { std::memcpy(p.tensors["v_scale.2"].second.data() + 4, &bad, 4); },
             "tensor 'v_scale.2' has the scale ");
    }
  }
}

TEST_F(SavedCacheTest, WhatIsNotASavedRingIsAFileError) {
  RingKVCache cache({.batch = 2, .dim = 2, .window = 10, .sink_tokens = 4});
  CacheModel model(cache.options());
  AppendRandom(random_, cache, model, List{100, 3});
  AppendRandom(random_, cache, model, List{5, 3});
  cache.Save(path());
  const Parts good(path());
  const auto expect = [&](const std::function<void(Parts&)>& spoil, const std::string& message) {
    Parts parts = good;
    spoil(parts);
    parts.Write(path());
    ExpectFileError([&] { RingKVCache::Load(path()); }, message);
  };
  using P = Parts;
  const std::string options = "metadata has options that a cache of kind ring cannot have";
  expect([](P& p) { p.metadata["capacity"] = "1000"; }, options);
  expect([](P& p) { p.metadata["page"] = "32"; }, options);
  expect([](P& p) { p.metadata["quantize"] = "int8"; }, options);
  expect([](P& p) { p.metadata["window"] = "0"; }, "RingKVCache: window is 0");
  expect([](P& p) { p.metadata["sink_tokens"] = "-1"; }, "RingKVCache: sink_tokens is -1");
  expect([](P& p) { p.metadata["shared_prefix"] = "1"; }, "metadata 'shared_prefix' is 1, expected 0 in a ring");
  expect([](P& p) { p.tensors.erase("first_kept"); }, "tensor 'first_kept' is not there");
  expect([](P& p) { p.Set("first_kept", 0, -1); }, "first_kept of sequence 0 is -1");
  expect([](P& p) { p.Set("first_kept", 0, 92); }, "first_kept of sequence 0 is 92, expected 91 to 91");
  expect([](P& p) { p.Set("first_kept", 1, 7); }, "first_kept of sequence 1 is 7, expected 0 to 4");
  expect([](P& p) { p.Set("first_kept", 0, 90); }, "first_kept of sequence 0 is 90, expected 91 to 91");
  expect([](P& p) { p.metadata["window"] = "11"; }, "first_kept of sequence 0 is 91, expected 90 to 90");
  expect([](P& p) { p.metadata["window"] = "9"; },  // rows and lists agree
         "first_kept of sequence 0 is 91, expected 92 to 92");
  expect([](P& p) { p.Set("lengths", 0, (int64_t{1} << 30) + 1); },
         "length of sequence 0 is 1073741825, expected 0 to 1073741824");
  expect([](P& p) { p.Set("lengths", 1, int64_t{1} << 30); },
         "length of sequence 1 is 1073741824, expected 0 to 1073741719");
  // A table of 128 MiB exceeds the caller's limit.
  Parts parts = good;
  parts.Set("lengths", 0, int64_t{1} << 29);
  parts.Set("first_kept", 0, (int64_t{1} << 29) - 14);
  parts.Write(path());
  ExpectFileError([&] { RingKVCache::Load(path(), 1 << 20); }, "more than max_bytes, 1048576, expected at most that");
  ExpectFileError([&] { KVCache::Load(path()); }, "metadata 'heed_cache' is ring, expected kv");
  ExpectFileError([&] { LatentKVCache::Load(path()); }, "metadata 'heed_cache' is ring, expected latent");
}

TEST_F(SavedCacheTest, WhatIsNotASavedLatentCacheIsAFileError) {
  LatentKVCache cache({.latent = 4, .rope = 2});
  CacheModel model(cache.options());
  AppendRandom(random_, cache, model, List{5});
  cache.Save(path());
  const Parts good(path());
  const auto expect = [&](const char* key, const char* value, const std::string& message) {
    Parts parts = good;
    parts.metadata[key] = value;
    parts.Write(path());
    ExpectFileError([&] { LatentKVCache::Load(path()); }, message);
  };
  const std::string options = "metadata has options that a cache of kind latent cannot have";
  expect("heads", "2", options);
  expect("value_dim", "7", options);
  expect("quantize", "int8", options);
  expect("window", "1", options);
  expect("dim", "5", "tensor 'rows.0' has shape [5,6], expected [5,5]");
  ExpectFileError([&] { RingKVCache::Load(path()); }, "metadata 'heed_cache' is latent, expected ring");
  WriteSafetensors(path(), std::vector<NamedTensor>{});
  ExpectFileError([&] { LatentKVCache::Load(path()); }, "metadata has no 'heed_cache', expected that of a saved cache");
  ExpectFileError([&] { KindOfSavedCache(path()); }, "metadata has no 'heed_cache'");
}

TEST_F(SavedCacheTest, PagesAreWithinTheLimit) {
  KVCache cache({.batch = 2, .dim = 4, .page = 4});
  CacheModel model(cache.options());
  AppendRandom(random_, cache, model, List{7, 1});
  cache.Save(path());
  const int64_t bytes = cache.nbytes() + 3 * 8;
  EXPECT_EQ(Difference(KVCache::Load(path(), bytes).view(), model), "");
  ExpectFileError([&] { KVCache::Load(path(), bytes - 1); }, "more than max_bytes");
}

// Loads a file of unknown content, reads all rows, and uses the cache.
template <class Cache>
bool LoadAnything(const std::string& path) {
  try {
    KindOfSavedCache(path);
    Cache cache = Cache::Load(path, 1 << 26);
    const KVView view = cache.view();
    uint64_t sum = 0;
    for (size_t b = 0; b < static_cast<size_t>(view.batch); ++b) {
      int64_t sinks = view.lengths[b], kept = 0;
      if constexpr (std::is_same_v<Cache, RingKVCache>) {
        sinks = cache.options().sink_tokens;
        kept = view.first_kept[b];
      }
      for (int64_t t = 0; t < view.lengths[b]; ++t) {
        if (t >= sinks && t < kept) continue;
        for (int64_t h = 0; h < view.heads; ++h) {
          const auto add = [&](const PageRows& rows, const PageRows& scales, int64_t dim) {
            for (const char c : ViewRow(view, rows, scales, b, t, h, dim)) {
              sum += static_cast<unsigned char>(c);
            }
          };
          add(view.key, view.key_scale, view.dim);
          add(view.value, view.value_scale, view.value_dim);
        }
      }
    }
    const Cache fork = cache.Fork();
    cache.Trim(List(cache.lengths().begin(), cache.lengths().end()));
    return fork.nbytes() == cache.nbytes() && sum != 1;
  } catch (const FileError& error) {
    EXPECT_EQ(std::string(error.what()).find(path + ": "), 0u) << error.what();
    return false;
  }
}

// Writes a new file of this name: some systems wait for the disk when a file is truncated.
void Rewrite(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path);
  WriteBytes(path, bytes);
}

template <class Cache>
void Fuzz(Random& random, const Cache& cache, const std::string& path) {
  cache.Save(path);
  const std::string good = ReadBytes(path);
  ASSERT_TRUE(LoadAnything<Cache>(path));
  for (size_t length = 0; length < good.size(); ++length) {
    Rewrite(path, good.substr(0, length));
    EXPECT_FALSE(LoadAnything<Cache>(path)) << length;
  }
  int passed = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string bad = good;
    for (int64_t flips = random.Integer(1, 4); flips > 0; --flips) {
      const auto at = static_cast<size_t>(random.Integer(0, static_cast<int64_t>(bad.size()) - 1));
      bad[at] = static_cast<char>(bad[at] ^ (1 << random.Integer(0, 7)));
    }
    Rewrite(path, bad);
    passed += LoadAnything<Cache>(path);
  }
  EXPECT_GT(passed, 0);  // for example changed bits of rows
  std::mt19937 damage(random.Word());
  for (int i = 0; i < 1500; ++i) {
    std::string bad = good;
    size_t header_end = good.rfind('}');
    Damage(damage, bad, header_end);
    if (i % 2 == 0) Damage(damage, bad, header_end);
    Rewrite(path, bad);
    LoadAnything<Cache>(path);
  }
}

TEST_F(SavedCacheTest, DamagedFilesDoNoHarm) {
  for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
    KVCache cache({.batch = 2, .dim = 3, .capacity = 9, .page = 2, .quantize = quantize});
    CacheModel model(cache.options());
    AppendRandom(random_, cache, model, List{5, 1});
    Fuzz(random_, cache, path());
    const KVCache one({.dim = 3, .page = 2, .quantize = quantize});
    KVCache shared = KVCache::Share(one, 2);
    model = CacheModel(shared.options());
    AppendRandom(random_, shared, model, List{2, 2});
    Fuzz(random_, shared, path());
  }
  RingKVCache ring({.dim = 1, .window = 3, .sink_tokens = 2});
  CacheModel ring_model(ring.options());
  AppendRandom(random_, ring, ring_model, List{200});
  AppendRandom(random_, ring, ring_model, List{1});
  Fuzz(random_, ring, path());
  LatentKVCache latent({.batch = 2, .latent = 2, .rope = 1});
  CacheModel latent_model(latent.options());
  AppendRandom(random_, latent, latent_model, List{3, 2});
  Fuzz(random_, latent, path());
}

}  // namespace
}  // namespace heed
