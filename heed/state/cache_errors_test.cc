// Every wrong use of a cache: the message, and that the cache is unchanged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "heed/core/error.h"
#include "heed/state/cache_model_case.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

using List = std::vector<int64_t>;
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

template <class Function>
void ExpectInvalid(Function&& function, const std::string& message) {
  EXPECT_THAT(function, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
}

TEST(CacheErrorsTest, OptionsOfKVCache) {
  using Options = KVCache::Options;
  const auto expect = [](const Options& o, const std::string& message) {
    ExpectInvalid([&] { KVCache cache(o); }, "KVCache: " + message);
  };
  expect({.batch = 0}, "batch is 0, expected at least 1");
  expect({.batch = -2}, "batch is -2, expected at least 1");
  expect({.heads = 0}, "heads is 0, expected at least 1");
  expect({.dim = 0}, "dim is 0, expected at least 1");
  expect({.dim = -1}, "dim is -1, expected at least 1");
  expect({.value_dim = -1}, "value_dim is -1, expected at least 1");
  expect({.page = -1}, "page is -1, expected at least 0");
  expect({.capacity = 0}, "capacity is 0, expected at least 1, or -1 for a cache that grows");
  expect({.capacity = -2}, "capacity is -2, expected at least 1");
  expect({.page = 0}, "page is 0 and capacity is -1, expected a capacity");
  for (const DType dtype : {DType::kI64, DType::kI32, DType::kBool}) {
    expect({.dtype = dtype}, std::string("dtype is ") + Name(dtype) + ", expected f64, f32, bf16 or f16");
  }
  expect({.dtype = DType::kF64, .quantize = Quantize::kInt8},
         "dtype is f64, expected f32, bf16 or f16 with quantised rows");
  expect({.dim = kMax}, "a row of 9223372036854775807 x 4 bytes is too large");
  expect({.value_dim = kMax}, "a row of 9223372036854775807 x 4 bytes is too large");
  expect({.dim = 1, .page = kMax}, "a head of a page of 9223372036854775807 x 4 bytes");
  expect({.heads = kMax, .page = 1}, "a page of 9223372036854775807 x 4 bytes");
  expect({.batch = kMax}, "a full cache of");
  expect({.capacity = kMax}, "a full cache of");
  expect({.batch = int64_t{1} << 30, .capacity = int64_t{1} << 30}, "a full cache of");
}

TEST(CacheErrorsTest, OptionsOfRingKVCache) {
  using Options = RingKVCache::Options;
  const auto expect = [](const Options& o, const std::string& message) {
    ExpectInvalid([&] { RingKVCache cache(o); }, "RingKVCache: " + message);
  };
  expect({.batch = 0}, "batch is 0, expected at least 1");
  expect({.heads = 0}, "heads is 0, expected at least 1");
  expect({.dim = 0}, "dim is 0, expected at least 1");
  expect({.value_dim = -3}, "value_dim is -3, expected at least 1");
  expect({.window = 0}, "window is 0, expected at least 1");
  expect({.sink_tokens = -1}, "sink_tokens is -1, expected at least 0");
  expect({.dtype = DType::kI32}, "dtype is i32, expected f64, f32, bf16 or f16");
  expect({.dim = kMax}, "a row of 9223372036854775807 x 4 bytes is too large");
}

TEST(CacheErrorsTest, OptionsOfLatentKVCache) {
  using Options = LatentKVCache::Options;
  const auto expect = [](const Options& o, const std::string& message) {
    ExpectInvalid([&] { LatentKVCache cache(o); }, "LatentKVCache: " + message);
  };
  expect({.batch = 0}, "batch is 0, expected at least 1");
  expect({.latent = 0}, "latent is 0, expected at least 1");
  expect({.rope = -1}, "rope is -1, expected at least 0");
  expect({.latent = kMax, .rope = 1}, "latent + rope is 2^63 or more");
  expect({.latent = kMax}, "a row of 9223372036854775807 x 4 bytes is too large");
  expect({.capacity = 0}, "capacity is 0, expected at least 1");
  expect({.page = 0}, "page is 0 and capacity is -1, expected a capacity");
  expect({.page = -1}, "page is -1, expected at least 0");
  expect({.dtype = DType::kBool}, "dtype is bool, expected f64, f32, bf16 or f16");
}

// Caches with a few rows, which are compared again at the end of each test.
class CacheErrors : public testing::Test {
 protected:
  CacheErrors() {
    AppendRandom(random_, cache_, model_, List{5, 3});
    AppendRandom(random_, ring_, ring_model_, List{100});
    AppendRandom(random_, ring_, ring_model_, List{2});
    AppendRandom(random_, latent_, latent_model_, List{5, 3});
  }
  ~CacheErrors() override {
    EXPECT_EQ(Difference(cache_.view(), model_), "");
    EXPECT_EQ(Difference(ring_.view(), ring_model_), "");
    EXPECT_EQ(Difference(latent_.view(), latent_model_), "");
  }

  const KVCache::Options options_ = {.batch = 2, .heads = 2, .dim = 4, .value_dim = 3, .capacity = 9};
  const RingKVCache::Options ring_options_ = {.dim = 4, .window = 10, .sink_tokens = 4};
  const LatentKVCache::Options latent_options_ = {.batch = 2, .latent = 4, .rope = 2};
  Random random_{1};
  KVCache cache_{options_};
  RingKVCache ring_{ring_options_};
  LatentKVCache latent_{latent_options_};
  CacheModel model_{options_}, ring_model_{ring_options_}, latent_model_{latent_options_};
};

TEST_F(CacheErrors, Append) {
  const Buffer k(DType::kF32, List{2, 5, 2, 4}), v(DType::kF32, List{2, 5, 2, 3});
  const auto expect = [&](const ConstTensorView& x, const ConstTensorView& y, const List& lengths,
                          const std::string& message) {
    ExpectInvalid([&] { cache_.Append(x, y, lengths); }, "KVCache::Append: " + message);
  };
  const auto shape = [](DType dtype, const List& sizes, Device device = {}) {
    return ConstTensorView(nullptr, dtype, sizes, device);
  };
  const Device device = {DeviceType::kCuda, 0};
  const auto f32 = DType::kF32;
  expect({}, v.view(), {}, "k is absent, expected a tensor");
  expect(k.view(), {}, {}, "v is absent, expected a tensor");
  expect(shape(f32, {2, 5, 2, 4}, device), v.view(), {}, "k is on cuda:0, expected the CPU");
  expect(k.view(), shape(f32, {2, 5, 2, 3}, device), {}, "v is on cuda:0, expected the CPU");
  expect(shape(f32, {2, 5, 2, 4}), v.view(), {}, "k has no data, expected a pointer to [2,5,2,4] elements");
  expect(k.view(), shape(f32, {2, 5, 2, 3}), {}, "v has no data, expected a pointer to [2,5,2,3] elements");
  expect({k.view().as<char>() + 1, f32, {2, 4, 2, 4}}, v.view().Slice(1, 0, 4), {},
         "k has a misaligned address, expected a multiple of 4 bytes");
  expect(shape(DType::kBF16, {2, 5, 2, 4}), v.view(), {}, "k has dtype bf16, expected f32");
  expect(k.view(), shape(DType::kF64, {2, 5, 2, 3}), {}, "v has dtype f64, expected f32");
  for (const List& sizes : {List{2, 5, 4}, {1, 5, 2, 4}, {2, 5, 1, 4}, {2, 5, 2, 3}, {1, 2, 5, 2, 4}}) {
    expect(shape(f32, sizes), v.view(), {}, "k has shape " + ShapeString(sizes) + ", expected [2,T,2,4]");
  }
  expect(k.view(), k.view(), {}, "v has shape [2,5,2,4], expected [2,T,2,3]");
  const Buffer longer(f32, List{2, 6, 2, 3});
  expect(k.view(), longer.view(), {}, "v has shape [2,6,2,3], expected 5 tokens as in k");
  expect(k.view(), v.view(), {1}, "lengths has 1 entries, expected 2, one per sequence");
  expect(k.view(), v.view(), {1, 6}, "lengths[1] is 6, expected 0 to 5, the tokens in k");
  expect(k.view(), v.view(), {-1, 0}, "lengths[0] is -1, expected 0 to 5");
  expect(k.view(), v.view(), {}, "sequence 0 would have 10 tokens, expected at most its capacity 9");
  // The tensor is longer than all memory, because its strides are 0 and every row is the same.
  const ConstTensorView endless(k.view().data(), f32, {1, kMax / 4, 1, 1}, {0, 0, 0, 0});
  KVCache one(KVCache::Options{});
  ExpectInvalid([&] { one.Append(endless, endless); },
                "KVCache::Append: sequence 0 would have 2^62 bytes, expected fewer");
}

TEST_F(CacheErrors, AppendOfWhatCannotBeQuantised) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const KVCache::Options options = {
        .batch = 2, .heads = 2, .dim = 4, .page = 4, .dtype = dtype, .quantize = Quantize::kInt8};
    KVCache cache(options);
    CacheModel model(options);
    AppendRandom(random_, cache, model, List{3, 2});
    const KVCache fork = cache.Fork();
    for (const bool in_k : {true, false}) {
      for (const double bad : {infinity, -infinity, nan}) {
        const Buffer k(dtype, List{2, 5, 2, 4}), v(dtype, List{2, 5, 2, 4});
        k.FillNormal(1);
        v.FillNormal(2);
        (in_k ? k : v).Set({1, 3, 1, 2}, bad);
        ExpectInvalid([&] { cache.Append(k.view(), v.view()); },
                      std::string("KVCache::Append: ") + (in_k ? "k" : "v") +
                          " has NaN or infinity in token 5, head 1 of sequence 1, "
                          "expected finite rows to quantise");
        EXPECT_EQ(Difference(cache.view(), model), "");
        EXPECT_EQ(Difference(fork.view(), model), "");
        // Valid as they are.
        KVCache::Share(KVCache({.heads = 2, .dim = 4, .dtype = dtype}), 2).Append(k.view(), v.view());
        cache.Fork().Append(k.view(), v.view(), List{5, 3});  // valid rows beyond the lengths
      }
    }
  }
}

TEST_F(CacheErrors, AppendToTheOthers) {
  const Buffer x(DType::kF32, List{1, 5, 1, 4});
  ExpectInvalid([&] { ring_.Append({}, x.view()); }, "RingKVCache::Append: k is absent");
  ExpectInvalid([&] { ring_.Append(x.view(), x.view(), List{6}); },
                "RingKVCache::Append: lengths[0] is 6, expected 0 to 5");
  ExpectInvalid([&] { ring_.Append(x.view(), {nullptr, DType::kF32, {1, 5, 1, 4}}); },
                "RingKVCache::Append: v has no data, expected a pointer to");
  const auto expect = [&](const ConstTensorView& rows, const List& lengths, const std::string& message) {
    ExpectInvalid([&] { latent_.Append(rows, lengths); }, "LatentKVCache::Append: " + message);
  };
  const auto shape = [](DType dtype, const List& sizes, Device device = {}) {
    return ConstTensorView(nullptr, dtype, sizes, device);
  };
  const auto f32 = DType::kF32;
  expect({}, {}, "rows is absent, expected a tensor");
  expect(shape(f32, {2, 5, 1, 6}), {}, "rows has shape [2,5,1,6], expected rank 3");
  expect(shape(f32, {2, 5, 5}), {}, "rows has shape [2,5,5], expected [2,T,6]");
  expect(shape(f32, {1, 5, 6}), {}, "rows has shape [1,5,6], expected [2,T,6]");
  expect(shape(DType::kF16, {2, 5, 6}), {}, "rows has dtype f16, expected f32");
  expect(shape(f32, {2, 5, 6}, {DeviceType::kCuda, 0}), {}, "rows is on cuda:0");
  expect(shape(f32, {2, 5, 6}), {}, "rows has no data, expected a pointer to");
  const Buffer rows(f32, List{2, 5, 6});
  expect(rows.view(), {1, 6}, "lengths[1] is 6, expected 0 to 5, the tokens in rows");
}

TEST_F(CacheErrors, Trim) {
  const auto expect = [&](const List& lengths, const std::string& message) {
    ExpectInvalid([&] { cache_.Trim(lengths); }, "KVCache::Trim: " + message);
    ExpectInvalid([&] { latent_.Trim(lengths); }, "LatentKVCache::Trim: " + message);
  };
  expect({}, "lengths has 0 entries, expected 2, one per sequence");
  expect({0, 0, 0}, "lengths has 3 entries, expected 2");
  expect({0, 4}, "lengths[1] is 4, expected 0 to the present 3");
  expect({0, -1}, "lengths[1] is -1, expected 0 to the present 3");
  const auto expect_ring = [&](const List& lengths, const std::string& message) {
    ExpectInvalid([&] { ring_.Trim(lengths); }, "RingKVCache::Trim: " + message);
  };
  expect_ring({103}, "lengths[0] is 103, expected 0 to the present 102");
  expect_ring({-1}, "lengths[0] is -1, expected 0 to the present 102");
  expect_ring({99},
              "lengths[0] is 99, expected at least 100 or at most the 4 sink tokens: "
              "the window before it is gone");
  expect_ring({5}, "lengths[0] is 5, expected at least 100 or at most the 4 sink tokens");
}

TEST_F(CacheErrors, ReorderAndShare) {
  const auto expect = [&](const List& indices, const std::string& message) {
    ExpectInvalid([&] { cache_.Reorder(indices); }, "KVCache::Reorder: " + message);
    ExpectInvalid([&] { latent_.Reorder(indices); }, "LatentKVCache::Reorder: " + message);
  };
  expect({0}, "indices has 1 entries, expected 2, one per sequence");
  expect({0, 2}, "indices[1] is 2, expected 0 to 1");
  expect({-1, 0}, "indices[0] is -1, expected 0 to 1");
  ExpectInvalid([&] { ring_.Reorder(List{1}); }, "RingKVCache::Reorder: indices[0] is 1, expected 0 to 0");
  ExpectInvalid([&] { KVCache::Share(cache_, 3); }, "KVCache::Share: prefix has batch 2, expected 1");
  ExpectInvalid([&] { LatentKVCache::Share(latent_, 3); }, "LatentKVCache::Share: prefix has batch 2, expected 1");
  const KVCache one(KVCache::Options{});
  ExpectInvalid([&] { KVCache::Share(one, 0); }, "batch is 0, expected at least 1");
  ExpectInvalid([&] { KVCache::Share(one, kMax); }, "a full cache of");
}

// A valid call of Import, of which each test invalidates one argument.
struct ImportCall {
  KVCache::Options options = {.batch = 2, .heads = 2, .dim = 4, .value_dim = 3};
  Buffer k{DType::kF32, List{4, 3, 2, 4}}, v{DType::kF32, List{4, 3, 2, 3}};
  List indptr = {0, 2, 3}, indices = {3, 0, 2}, last = {1, 3};
  bool heads_first = false;
  std::function<void(KVCache::BlockTables&)> spoil = [](KVCache::BlockTables&) {};

  void Run() const {
    const auto list = [](const List& x) {
      return ConstTensorView(x.data(), DType::kI64, {static_cast<int64_t>(x.size())});
    };
    KVCache::BlockTables tables = {k.view(), v.view(), list(indptr), list(indices), list(last), heads_first};
    spoil(tables);
    KVCache::Import(options, tables);
  }
};

TEST(CacheErrorsTest, Import) {
  ImportCall().Run();
  const auto expect = [](const std::function<void(ImportCall&)>& spoil, const std::string& message) {
    ImportCall call;
    spoil(call);
    ExpectInvalid([&] { call.Run(); }, "KVCache::Import: " + message);
  };
  using C = ImportCall;
  using Tables = KVCache::BlockTables;
  const auto f32 = DType::kF32;
  expect([](C& c) { c.k = {}; }, "k_pool is absent, expected a tensor");
  expect([](C& c) { c.v = {}; }, "v_pool is absent, expected a tensor");
  expect([](C& c) { c.k = Buffer(DType::kF16, List{4, 3, 2, 4}); }, "k_pool has dtype f16, expected f32");
  expect([&](C& c) { c.k = Buffer(f32, List{4, 3, 2, 5}); },
         "k_pool has shape [4,3,2,5], expected [pages,tokens,2,4] with at least one token");
  expect([&](C& c) { c.v = Buffer(f32, List{4, 3, 1, 3}); }, "v_pool has shape [4,3,1,3], expected [pages,tokens,2,3]");
  expect([&](C& c) { c.k = Buffer(f32, List{4, 3, 2}); }, "k_pool has shape [4,3,2]");
  expect([&](C& c) { c.k = Buffer(f32, List{4, 0, 2, 4}); }, "k_pool has shape [4,0,2,4]");
  expect([](C& c) { c.heads_first = true; }, "k_pool has shape [4,3,2,4], expected [pages,2,tokens,4]");
  expect([&](C& c) { c.v = Buffer(f32, List{4, 2, 2, 3}); },
         "v_pool has shape [4,2,2,3], expected 4 pages of 3 tokens as in k_pool");
  expect([&](C& c) { c.v = Buffer(f32, List{5, 3, 2, 3}); },
         "v_pool has shape [5,3,2,3], expected 4 pages of 3 tokens as in k_pool");
  expect([](C& c) { c.spoil = [](Tables& t) { t.indptr = {}; }; }, "indptr is absent, expected a tensor");
  expect([](C& c) { c.spoil = [](Tables& t) { t.indices = {}; }; }, "indices is absent, expected a tensor");
  expect([](C& c) { c.spoil = [](Tables& t) { t.last_page_len = {}; }; }, "last_page_len is absent, expected a tensor");
  const Device device = {DeviceType::kCuda, 0};
  expect([&](C& c) { c.spoil = [&](Tables& t) { t.indptr = {nullptr, DType::kI32, {3}, device}; }; },
         "indptr is on cuda:0, expected the CPU");
  expect([&](C& c) { c.spoil = [&](Tables& t) { t.k_pool = {nullptr, f32, {4, 3, 2, 4}, device}; }; },
         "k_pool is on cuda:0, expected the CPU");
  expect([&](C& c) { c.spoil = [&](Tables& t) { t.k_pool = {nullptr, f32, {4, 3, 2, 4}}; }; },
         "k_pool has no data, expected a pointer to");
  expect([&](C& c) { c.spoil = [&](Tables& t) { t.v_pool = {nullptr, f32, {4, 3, 2, 3}}; }; },
         "v_pool has no data, expected a pointer to");
  using Table = ConstTensorView Tables::*;
  for (const auto& [name, list, size] : {std::tuple<const char*, Table, int64_t>{"indptr", &Tables::indptr, 3},
                                         {"indices", &Tables::indices, 3},
                                         {"last_page_len", &Tables::last_page_len, 2}}) {
    expect([list = list, size = size](C& c) { c.spoil = [=](Tables& t) { t.*list = {nullptr, DType::kI64, {size}}; }; },
           std::string(name) + " has no data, expected a pointer to");
  }
  expect([](C& c) { c.spoil = [](Tables& t) { t.indices = {nullptr, DType::kF32, {3}}; }; },
         "indices has dtype f32, expected i32 or i64");
  expect([](C& c) { c.spoil = [](Tables& t) { t.indices = {nullptr, DType::kI32, {1, 3}}; }; },
         "indices has shape [1,3], expected [0] or longer");
  expect([](C& c) { c.indptr = {0, 2}; }, "indptr has shape [2], expected [3]");
  expect([](C& c) { c.last = {1, 2, 3}; }, "last_page_len has shape [3], expected [2]");
  expect([](C& c) { c.indptr = {1, 2, 3}; }, "indptr[0] is 1, expected 0 to 0");
  expect([](C& c) { c.indptr = {0, 2, 1}; }, "indptr[2] is 1, expected 2 to 3");
  expect([](C& c) { c.indptr = {0, 2, 4}; }, "indptr[2] is 4, expected 2 to 3");
  expect([](C& c) { c.indptr = {0, -1, 3}; }, "indptr[1] is -1, expected 0 to 3");
  expect([](C& c) { c.indices[1] = 4; }, "indices[1] is 4, expected 0 to 3");
  expect([](C& c) { c.indices[2] = -1; }, "indices[2] is -1, expected 0 to 3");
  expect([](C& c) { c.last[0] = 0; }, "last_page_len[0] is 0, expected 1 to 3");
  expect([](C& c) { c.last[1] = 4; }, "last_page_len[1] is 4, expected 1 to 3");
  expect([](C& c) { c.options.capacity = 3; }, "sequence 0 would have 4 tokens, expected at most its capacity 3");
  expect([](C& c) { c.options.quantize = Quantize::kInt8; }, "k has NaN or infinity");
  ImportCall wrong;
  wrong.options.batch = 0;
  ExpectInvalid([&] { wrong.Run(); }, "KVCache: batch is 0, expected at least 1");
}

}  // namespace
}  // namespace heed
