// Random operations on all caches, compared with plain lists of rows. HEED_TEST_OPERATIONS sets their number.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/file_testing_internal.h"
#include "heed/state/cache_model_case.h"
#include "heed/state/sketch_case.h"

namespace heed {
namespace {

int64_t NumOperations() {
  const char* const text = std::getenv("HEED_TEST_OPERATIONS");
  return text == nullptr ? 40000 : std::atoll(text);
}

KVCache::Options RandomOptions(Random& r, const KVCache*) {
  KVCache::Options o;
  o.batch = r.Integer(1, 4);
  o.heads = r.Integer(1, 3);
  o.dim = r.Integer(1, 9);
  o.value_dim = r.Chance(0.5) ? 0 : r.Integer(1, 9);
  o.page = r.Pick<int64_t>({1, 2, 5, 16, 64});
  if (r.Chance(0.4)) o.capacity = r.Integer(1, 90);
  if (r.Chance(0.2)) o.page = 0, o.capacity = r.Integer(1, 90);
  o.dtype = r.Pick({DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
  if (o.dtype != DType::kF64 && r.Chance(0.4)) o.quantize = Quantize::kInt8;
  if (o.dtype != DType::kF64 && o.quantize == Quantize::kNone && o.page % 64 == 0) o.sketch = Sketch::kInt8;
  return o;
}

RingKVCache::Options RandomOptions(Random& r, const RingKVCache*) {
  RingKVCache::Options o;
  o.batch = r.Integer(1, 3);
  o.heads = r.Integer(1, 2);
  o.dim = r.Integer(1, 5);
  o.value_dim = r.Chance(0.5) ? 0 : r.Integer(1, 5);
  o.window = r.Pick<int64_t>({1, 2, 30, 64, 65, 100});
  o.sink_tokens = r.Pick<int64_t>({0, 0, 1, 4, 64, 70});
  o.dtype = r.Pick({DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
  return o;
}

LatentKVCache::Options RandomOptions(Random& r, const LatentKVCache*) {
  LatentKVCache::Options o;
  o.batch = r.Integer(1, 4);
  o.latent = r.Integer(1, 9);
  o.rope = r.Integer(0, 5);
  o.page = r.Pick<int64_t>({1, 3, 16, 64});
  if (r.Chance(0.4)) o.capacity = r.Integer(1, 90);
  if (r.Chance(0.2)) o.page = 0, o.capacity = r.Integer(1, 90);
  o.dtype = r.Pick({DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
  return o;
}

template <class Cache>
int64_t CapacityOf(const Cache& cache) {
  if constexpr (std::is_same_v<Cache, RingKVCache>)
    return -1;
  else
    return cache.options().capacity;
}

template <class Cache>
class RandomCachesTest : public FileTest {
 protected:
  struct Live {
    Cache cache;
    CacheModel model;
  };

  int64_t Index(size_t size) { return random_.Integer(0, static_cast<int64_t>(size) - 1); }

  void Append(Live& live) {
    const int64_t capacity = CapacityOf(live.cache);
    const bool wild = random_.Chance(0.05);  // may exceed the capacity
    const int64_t most = random_.Pick<int64_t>({1, 1, 3, 20, 20, 150});
    std::vector<int64_t> counts;
    bool fits = true;
    for (size_t b = 0; b < live.model.tokens.size(); ++b) {
      int64_t n = random_.Integer(0, most);
      const int64_t room = capacity - live.model.length(b);
      if (capacity != -1 && !wild) n = std::min(n, room);
      fits = fits && (capacity == -1 || n <= room);
      counts.push_back(n);
    }
    CacheModel next = live.model;  // discarded if the append fails
    if (fits) {
      AppendRandom(random_, live.cache, live.model, counts);
    } else {
      EXPECT_THROW(AppendRandom(random_, live.cache, next, counts), InvalidArgument);
    }
  }

  void Trim(Live& live) {
    std::vector<int64_t> to;
    bool legal = true;
    for (size_t b = 0; b < live.model.tokens.size(); ++b) {
      const int64_t length = live.model.length(b);
      const int64_t cut = random_.Pick<int64_t>({0, 1, 5, live.model.appended[b], length});
      to.push_back(random_.Chance(0.01) ? random_.Pick<int64_t>({-1, length + 1}) : std::max<int64_t>(length - cut, 0));
      legal = legal && live.model.CanTrim(b, to.back());
    }
    if (legal) {
      live.cache.Trim(to);
      live.model.Trim(to);
    } else {
      EXPECT_THROW(live.cache.Trim(to), InvalidArgument);
    }
  }

  void Reorder(Live& live) {
    std::vector<int64_t> indices;
    for (size_t b = 0; b < live.model.tokens.size(); ++b) {
      indices.push_back(Index(live.model.tokens.size()));
    }
    live.cache.Reorder(indices);
    live.model.Reorder(indices);
  }

  void Share(const Live& live) {
    if constexpr (!std::is_same_v<Cache, RingKVCache>) {
      const int64_t batch = random_.Integer(1, 4);
      if (live.model.batch() != 1) {
        EXPECT_THROW(Cache::Share(live.cache, batch), InvalidArgument);
      } else {
        all_.push_back({Cache::Share(live.cache, batch), live.model.Share(batch)});
      }
    }
  }

  void SaveAndLoad(Live& live) {
    const std::string path = this->Path("x");
    live.cache.Save(path);
    live.cache = Cache::Load(path);
  }

  void Step() {
    Live& live = all_[static_cast<size_t>(Index(all_.size()))];
    const int64_t choice = random_.Integer(0, 99);
    if (choice < 50) {
      Append(live);
    } else if (choice < 65) {
      Trim(live);
    } else if (choice < 75) {
      Reorder(live);
    } else if (choice < 84) {
      Live fork{live.cache.Fork(), live.model};
      all_.push_back(std::move(fork));
    } else if (choice < 90) {
      const Live& prefix = live;
      Share(prefix);
    } else if (choice < 92) {
      SaveAndLoad(live);
    }
    while (all_.size() > 4 || (all_.size() > 1 && random_.Chance(0.1))) {
      all_.erase(all_.begin() + Index(all_.size()));
    }
  }

  void Check() {
    for (const Live& live : all_) {
      ASSERT_EQ(Difference(live.cache.view(), live.model), "");
      if (live.cache.view().sketch.present) {
        ASSERT_EQ(SketchDifference(live.cache.view()), "");
      }
      if constexpr (!std::is_same_v<Cache, RingKVCache>) {
        ASSERT_EQ(live.cache.shared_prefix(), live.model.shared_prefix);
      }
    }
  }

  Random random_{2024};
  std::vector<Live> all_;
};

using Caches = testing::Types<KVCache, RingKVCache, LatentKVCache>;
TYPED_TEST_SUITE(RandomCachesTest, Caches);

TYPED_TEST(RandomCachesTest, AllRowsAreThoseOfAPlainList) {
  constexpr int64_t kEpisode = 40;
  for (int64_t i = 0; i < NumOperations() / 3; ++i) {
    if (i % kEpisode == 0) {
      this->all_.clear();
      const auto options = RandomOptions(this->random_, static_cast<const TypeParam*>(nullptr));
      this->all_.push_back({TypeParam(options), CacheModel(options)});
    }
    this->Step();
    this->Check();
    if (testing::Test::HasFatalFailure()) FAIL() << "operation " << i;
  }
}

}  // namespace
}  // namespace heed
