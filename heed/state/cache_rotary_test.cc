// Caches that rotate their keys hold the bits that heed::Rotary gives for the same positions, after any sequence of
// operations. Options that are invalid for every cache are refused.
#include "heed/state/cache_rotary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"
#include "heed/io/safetensors.h"
#include "heed/state/cache_model_case.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

using List = std::vector<int64_t>;

constexpr RotaryPairs kPairs[] = {RotaryPairs::kHalfSplit, RotaryPairs::kInterleaved};

// k [B, T, H, D], with row t of sequence b rotated to position first[b] + t.
Buffer Rotated(const CacheRotary& rotary, const ConstTensorView& k, const List& first) {
  const Buffer plain(k.dtype(), k.sizes()), rotated(k.dtype(), k.sizes());
  List index(4, 0), positions;
  if (k.num_elements() > 0) {
    do {
      SetElement(plain.view(), index, GetElement(k, index));
    } while (NextIndex(k.sizes(), index));
  }
  for (const int64_t p : first) {
    for (int64_t t = 0; t < k.size(1); ++t) positions.push_back(p + t);
  }
  Context ctx(1);
  Rotary(ctx, plain.view(), ConstTensorView(positions.data(), DType::kI64, {k.size(0), k.size(1)}), rotary.pairs,
         rotary.options, rotated.view());
  return rotated;
}

// A cache and the list of rows that it should hold.
template <class Cache>
struct Pair {
  Pair(typename Cache::Options options, const CacheRotary& how) : rotary(how), model(options) {
    options.rotary = how;
    cache.emplace(options);
  }

  void Append(const List& counts, bool rotated = true) {
    const int64_t T = *std::max_element(counts.begin(), counts.end());
    const RandomRows k(random, model.dtype, true, {model.batch(), T, model.heads, model.dim});
    const RandomRows v(random, model.dtype, true, {model.batch(), T, model.heads, model.value_dim});
    const List before = model.lengths();
    cache->Append(k.view(), v.view(), counts);
    const Buffer expected = Rotated(rotary, k.view(), before);
    model.Append(rotated ? ConstTensorView(expected.view()) : k.view(), v.view(), counts);
  }
  std::string Difference() const { return heed::Difference(cache->view(), model); }

  CacheRotary rotary;
  CacheModel model;
  std::optional<Cache> cache;
  Random random{3};
};

TEST(CacheRotaryTest, KeysAreRotatedByTheirPositionsToTheBit) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
      if (dtype == DType::kF64 && quantize == Quantize::kInt8) continue;
      for (const RotaryPairs pairs : kPairs) {
        for (const int64_t dim : {2, 14, 38}) {
          CacheRotary rotary = {.pairs = pairs};
          if (dim < 38) rotary.options.dim = dim;
          Pair<KVCache> pair(
              {.batch = 2, .heads = 3, .dim = 38, .value_dim = 5, .page = 7, .dtype = dtype, .quantize = quantize},
              rotary);
          SCOPED_TRACE(std::string(Name(dtype)) + " dim " + std::to_string(dim));
          pair.Append({3, 0});
          pair.Append({40, 65});
          for (int i = 0; i < 5; ++i) pair.Append({1, i % 2});
          ASSERT_EQ(pair.Difference(), "");
        }
      }
    }
  }
}

TEST(CacheRotaryTest, ScalingsThatDoNotDependOnTheLengthAreTaken) {
  std::vector<RotaryScaling> all(4);
  all[0] = {.rope_type = RopeType::kLinear, .factor = 4};
  all[1] = {.rope_type = RopeType::kNtk, .factor = 4};
  all[2] = {.rope_type = RopeType::kYarn, .factor = 4, .original_max_position_embeddings = 64};
  all[3] = {.rope_type = RopeType::kLlama3,
            .factor = 8,
            .original_max_position_embeddings = 64,
            .low_freq_factor = 1,
            .high_freq_factor = 4};
  for (const RotaryScaling& scaling : all) {
    CacheRotary rotary = {.pairs = RotaryPairs::kHalfSplit};
    rotary.options = {.base = 500, .scaling = scaling};
    Pair<KVCache> pair({.dim = 16}, rotary);
    pair.Append({300});
    EXPECT_EQ(pair.Difference(), "");
  }
}

TEST(CacheRotaryTest, ForksTrimsAndOrdersGoOnRotating) {
  Pair<KVCache> pair({.batch = 3, .heads = 2, .dim = 8, .page = 4}, {RotaryPairs::kInterleaved});
  pair.Append({5, 9, 2});
  const List order = {1, 1, 0};
  pair.cache->Reorder(order);
  pair.model.Reorder(order);
  pair.Append({1, 3, 2});
  const List lengths = {6, 12, 0};
  pair.cache->Trim(lengths);
  pair.model.Trim(lengths);
  pair.Append({2, 0, 4});
  EXPECT_EQ(pair.Difference(), "");
  pair.cache = pair.cache->Fork();
  pair.Append({2, 1, 4});
  EXPECT_EQ(pair.Difference(), "");

  Pair<KVCache> one({.dim = 8}, {RotaryPairs::kInterleaved});
  one.Append({70});
  one.cache = KVCache::Share(*one.cache, 4);
  one.model = one.model.Share(4);
  one.Append({1, 2, 3, 0});
  EXPECT_EQ(one.Difference(), "");
  EXPECT_EQ(one.cache->options().rotary->pairs, RotaryPairs::kInterleaved);
}

TEST(CacheRotaryTest, RingsRotateByPositionsOrLeaveItToAttend) {
  for (const bool by_place : {false, true}) {
    RingKVCache::Options options = {.heads = 2, .dim = 8, .window = 20, .sink_tokens = 3};
    if (by_place) options.positions = RingPositions::kCache;
    Pair<RingKVCache> pair(options, {RotaryPairs::kHalfSplit});
    for (const int64_t n : {1, 100, 30, 1, 1, 64}) pair.Append({n}, !by_place);
    EXPECT_EQ(pair.Difference(), "");
    pair.cache = pair.cache->Fork();
    pair.Append({5}, !by_place);
    EXPECT_EQ(pair.Difference(), "");
    EXPECT_EQ(pair.cache->options().positions, options.positions);
    EXPECT_EQ(pair.cache->view().rotated_in_cache, by_place);
    EXPECT_EQ(pair.cache->view().window, 20);
  }
}

TEST(CacheRotaryTest, ImportedRowsAreRotatedAsIfAppended) {
  const Buffer pool(DType::kF32, {3, 4, 2, 6});
  pool.FillNormal(5);
  const List indptr = {0, 2}, indices = {2, 0}, last = {3};
  KVCache::BlockTables tables;
  tables.k_pool = tables.v_pool = pool.view();
  tables.indptr = ConstTensorView(indptr.data(), DType::kI64, {2});
  tables.indices = ConstTensorView(indices.data(), DType::kI64, {2});
  tables.last_page_len = ConstTensorView(last.data(), DType::kI64, {1});
  KVCache::Options options = {.heads = 2, .dim = 6};
  CacheModel model(options);
  options.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  const KVCache cache = KVCache::Import(options, tables);
  const Buffer rows(DType::kF32, {1, 7, 2, 6});
  for (int64_t t = 0; t < 7; ++t) {
    for (int64_t i = 0; i < 12; ++i) {
      rows.Set({0, t, i / 6, i % 6}, pool.Get({t < 4 ? 2 : 0, t % 4, i / 6, i % 6}));
    }
  }
  model.Append(Rotated(*options.rotary, rows.view(), {0}).view(), rows.view(), List{7});
  EXPECT_EQ(Difference(cache.view(), model), "");
}

TEST(CacheRotaryTest, RowsThatBecomeInfiniteCannotBeQuantised) {
  KVCache cache(
      {.dim = 2, .dtype = DType::kF16, .quantize = Quantize::kInt8, .rotary = CacheRotary{RotaryPairs::kHalfSplit}});
  const Buffer k(DType::kF16, {1, 2, 1, 2});
  k.FillConstant(60000);
  EXPECT_THAT([&] { cache.Append(k.view(), k.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("KVCache::Append: k, rotated, has NaN or infinity in token 1")));
  EXPECT_EQ(cache.lengths()[0], 0);
  EXPECT_EQ(cache.nbytes(), 0);
}

TEST(CacheRotaryTest, OptionsThatNoCacheCanHaveAreNamed) {
  const auto expect = [](const CacheRotary& rotary, const std::string& message) {
    KVCache::Options kv = {.dim = 8, .rotary = rotary};
    EXPECT_THAT([&] { KVCache cache(kv); },
                ThrowsMessage<InvalidArgument>(AllOf(StartsWith("KVCache: rotary"), HasSubstr(message))));
    RingKVCache::Options ring = {.dim = 8, .rotary = rotary};
    ring.positions = RingPositions::kCache;
    EXPECT_THAT([&] { RingKVCache cache(ring); },
                ThrowsMessage<InvalidArgument>(AllOf(StartsWith("RingKVCache: rotary"), HasSubstr(message))));
  };
  const auto with = [](const RotaryOptions& options) { return CacheRotary{RotaryPairs::kHalfSplit, options}; };
  for (const int64_t dim : {-2, 0, 1, 3, 7, 10}) {
    expect(with({.dim = dim}), "dim is " + std::to_string(dim) + ", expected an even number from 2 to 8");
  }
  expect(with({.base = 1}), "base is 1");
  expect(with({.scaling = {.rope_type = RopeType::kLinear}}), "factor is missing");
  expect(with({.inverse = true}), "inverse is true, expected false");
  expect(with({.scaling = {.rope_type = RopeType::kDynamic, .factor = 2}}),
         "scaling.rope_type is dynamic, expected one that does not depend on the length");
  expect(with({.scaling = {.rope_type = RopeType::kLongrope}}), "scaling.rope_type is longrope");
  expect({static_cast<RotaryPairs>(7)}, "pairs is unknown");
  EXPECT_THAT([] { KVCache cache({.dim = 7, .rotary = CacheRotary{RotaryPairs::kHalfSplit}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("rotary dim is 7")));
  EXPECT_THAT([] { KVCache cache({.dim = 65538, .rotary = CacheRotary{RotaryPairs::kHalfSplit}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("expected an even number from 2 to 65536")));
  RingKVCache::Options ring = {.dim = 8};
  ring.positions = RingPositions::kCache;
  EXPECT_THAT([&] { RingKVCache cache(ring); },
              ThrowsMessage<InvalidArgument>(HasSubstr("RingKVCache: positions is kCache without rotary")));
}

class SavedRotaryTest : public FileTest {
 protected:
  std::string path() const { return Path("cache.safetensors"); }
};

TEST_F(SavedRotaryTest, OptionsComeBackAndRotatingGoesOn) {
  CacheRotary rotary = {.pairs = RotaryPairs::kInterleaved};
  rotary.options = {.base = 1234.5,
                    .dim = 6,
                    .scaling = {.rope_type = RopeType::kYarn,
                                .factor = 3.25,
                                .original_max_position_embeddings = 40,
                                .max_position_embeddings = 99,
                                .attention_factor = 1.1,
                                .beta_fast = 31,
                                .beta_slow = 2,
                                .mscale = 0.5,
                                .mscale_all_dim = 0.75,
                                .truncate = false}};
  Pair<KVCache> pair({.batch = 2, .heads = 2, .dim = 8}, rotary);
  pair.Append({3, 80});
  pair.cache->Save(path());
  pair.cache = KVCache::Load(path());
  const RotaryOptions o = pair.cache->options().rotary->options;
  EXPECT_EQ(pair.cache->options().rotary->pairs, RotaryPairs::kInterleaved);
  EXPECT_EQ(o.base, 1234.5);
  EXPECT_EQ(o.dim, 6);
  EXPECT_EQ(o.scaling.rope_type, RopeType::kYarn);
  EXPECT_EQ(o.scaling.factor, 3.25);
  EXPECT_EQ(o.scaling.original_max_position_embeddings, 40);
  EXPECT_EQ(o.scaling.max_position_embeddings, 99);
  EXPECT_EQ(o.scaling.attention_factor, 1.1);
  EXPECT_EQ(o.scaling.beta_fast, 31);
  EXPECT_EQ(o.scaling.beta_slow, 2);
  EXPECT_EQ(o.scaling.mscale, 0.5);
  EXPECT_EQ(o.scaling.mscale_all_dim, 0.75);
  EXPECT_EQ(o.scaling.truncate, false);
  EXPECT_EQ(o.scaling.low_freq_factor, std::nullopt);
  EXPECT_EQ(o.scaling.high_freq_factor, std::nullopt);
  pair.Append({1, 2});
  EXPECT_EQ(pair.Difference(), "");

  RingKVCache::Options ring = {.dim = 8, .window = 5};
  ring.rotary = CacheRotary{
      RotaryPairs::kHalfSplit,
      {.scaling = {.rope_type = RopeType::kLlama3, .factor = 2, .low_freq_factor = 1, .high_freq_factor = 3}}};
  for (const RingPositions positions : {RingPositions::kAbsolute, RingPositions::kCache}) {
    ring.positions = positions;
    ring.rotary->options.scaling.original_max_position_embeddings = 64;
    RingKVCache(ring).Save(path());
    const RingKVCache::Options loaded = RingKVCache::Load(path()).options();
    EXPECT_EQ(loaded.positions, positions);
    EXPECT_EQ(loaded.rotary->options.scaling.low_freq_factor, 1);
    EXPECT_EQ(loaded.rotary->options.scaling.high_freq_factor, 3);
    EXPECT_EQ(loaded.rotary->options.dim, std::nullopt);
    EXPECT_EQ(loaded.rotary->options.scaling.truncate, std::nullopt);
  }
  KVCache({.dim = 3}).Save(path());
  EXPECT_FALSE(KVCache::Load(path()).options().rotary.has_value());
}

TEST_F(SavedRotaryTest, WhatNoCacheHasWrittenIsAFileError) {
  struct File {
    std::map<std::string, std::string> metadata;
    std::vector<double> numbers;
    DType dtype = DType::kF64;
  };
  const auto expect = [&](bool ring, const std::function<void(File&)>& spoil, const std::string& message) {
    const CacheRotary rotary = {RotaryPairs::kHalfSplit};
    if (ring) {
      RingKVCache::Options options = {.dim = 8, .rotary = rotary};
      options.positions = RingPositions::kCache;
      RingKVCache(options).Save(path());
    } else {
      KVCache({.dim = 8, .rotary = rotary}).Save(path());
    }
    {
      const SafetensorsFile saved(path());
      const double* const numbers = saved.tensor("rotary").as<double>();
      File file = {saved.metadata(), {numbers, numbers + saved.tensor("rotary").size(0)}};
      spoil(file);
      std::vector<NamedTensor> tensors;
      for (const std::string& name : saved.names()) {
        if (name != "rotary") tensors.push_back({name, saved.tensor(name)});
      }
      if (!file.numbers.empty()) {
        tensors.push_back({"rotary", {file.numbers.data(), file.dtype, {static_cast<int64_t>(file.numbers.size())}}});
      }
      WriteSafetensors(path(), tensors, file.metadata);
    }
    EXPECT_THAT([&] { ring ? (void)RingKVCache::Load(path()) : (void)KVCache::Load(path()); },
                ThrowsMessage<FileError>(AllOf(StartsWith(path() + ": "), HasSubstr(message))));
  };
  using F = File;
  const auto number = [&](size_t i, double value, const std::string& message) {
    expect(false, [&](F& f) { f.numbers[i] = value; }, message);
  };
  const double inf = std::numeric_limits<double>::infinity();
  expect(
      false, [](F& f) { f.metadata["rotary_pairs"] = "x"; },
      "metadata 'rotary_pairs' is 'x', expected half_split or interleaved");
  expect(false, [](F& f) { f.metadata.erase("rotary_pairs"); }, "'rotary_pairs' is ''");
  expect(false, [](F& f) { f.metadata.erase("rotary_type"); }, "scaling.rope_type is ''");
  expect(false, [](F& f) { f.metadata["rotary_type"] = "dynamic"; }, "KVCache: rotary scaling.rope_type is dynamic");
  expect(false, [](F& f) { f.metadata["positions"] = "cache"; }, "options that a cache of kind kv cannot have");
  expect(
      true, [](F& f) { f.metadata["positions"] = "absolute"; }, "metadata 'positions' is 'absolute', expected cache");
  expect(
      true,
      [](F& f) {
        f.metadata.erase("rotary_pairs");
        f.metadata.erase("rotary_type");
      },
      "RingKVCache: positions is kCache without rotary");
  expect(false, [](F& f) { f.numbers.clear(); }, "rotary");
  expect(false, [](F& f) { f.numbers.pop_back(); }, "tensor 'rotary' has shape [12], expected [13]");
  expect(false, [](F& f) { f.dtype = DType::kI64; }, "tensor 'rotary' has dtype i64");
  number(0, 0.5, "KVCache: rotary: base is 0.5");
  number(0, inf, "KVCache: rotary: base is inf");
  number(1, 3, "KVCache: rotary dim is 3");
  number(1, 1e300, "rotary dim is ");
  number(1, 2.5, "rotary dim is 2.5");
  number(1, -inf, "rotary dim is -inf");
  number(2, 0.5, "rotary truncate is 0.5");
  number(3, 2, "scaling.factor is given");
}

// Sinks are rotated as if the ring had released every row that the first new row does not see.
TEST_F(SavedRotaryTest, ARingHasNothingThatItsRowsDoNotSee) {
  RingKVCache::Options options = {.dim = 8, .window = 5, .sink_tokens = 2};
  options.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  options.positions = RingPositions::kCache;
  RingKVCache ring(options);
  const Buffer rows(DType::kF32, List{1, 20, 1, 8});
  rows.FillNormal(1);
  ring.Append(rows.view(), rows.view());
  ring.Append(rows.view().Slice(1, 0, 3), rows.view().Slice(1, 0, 3));
  ring.Save(path());
  RingKVCache::Load(path());
  {
    const SafetensorsFile saved(path());
    std::map<std::string, std::string> metadata = saved.metadata();
    metadata["window"] = "4";
    std::vector<NamedTensor> tensors;
    for (const std::string& name : saved.names()) tensors.push_back({name, saved.tensor(name)});
    WriteSafetensors(path(), tensors, metadata);
  }
  EXPECT_THAT([&] { RingKVCache::Load(path()); },
              ThrowsMessage<FileError>(HasSubstr("first_kept of sequence 0 is 16, expected 17 to 17")));
}

}  // namespace
}  // namespace heed
