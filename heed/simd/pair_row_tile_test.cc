// Products of a few rows with many of bf16 are the same chains as tiles of pairs, bit for
// bit: every number of rows and size, between guard pages.
#define HEED_BF16_PAIRS
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/pair_row_tile_test.cc"  // this file
#include "hwy/foreach_target.h"                               // IWYU pragma: keep
#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"
#if HWY_TARGET == HEED_PAIR_TARGET
// After highway.h, and before others that are compiled per target:
#include "heed/simd/pair_products-inl.h"
// After pair_products-inl.h:
#include "heed/simd/pair_row_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::pair_row_tile_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

constexpr hn::ScalableTag<float> d;
constexpr size_t N = hn::MaxLanes(hn::ScalableTag<float>());

// Rows of bf16 without gaps, and words of pairs [.][N].
struct Call {
  int few;
  const BF16* rows;
  size_t count, columns;
  const uint32_t* pairs;
  float* out;

  hs::StoredRows<BF16> stored() const { return {{rows, static_cast<ptrdiff_t>(columns), SIZE_MAX}, count, 1000}; }
};

template <class F>
void WithFew(int few, const F& f) {
  if (few == 1) f(std::integral_constant<int, 1>());
  if (few == 2) f(std::integral_constant<int, 2>());
  if (few == 4) f(std::integral_constant<int, 4>());
  if constexpr (N >= 8) {
    if (few == 8) f(std::integral_constant<int, 8>());
  }
}

// out[row][lane]
void Dots(const Call& a) {
  WithFew(a.few, [&](auto r) { hs::DotPairRows<r.value>(d, a.stored(), a.columns, a.pairs, a.out); });
}

void DotsByTile(const Call& a) {
  const size_t num_pairs = (a.columns + 1) / 2;
  const auto q = hwy::AllocateAligned<uint32_t>(num_pairs * N);
  std::copy_n(a.pairs, num_pairs * N, q.get());
  hs::ArrangeLanes(d, q.get(), N, num_pairs, N);
  for (size_t j = 0; j < a.count; ++j) {
    hn::Vec<decltype(d)> max[1] = {hn::Zero(d)};
    hs::LogitPairTile<1, 1>(d, q.get(), N, a.rows + j * a.columns, 0, a.columns, a.out + j * N, max,
                            [](auto x, int, int) { return x; });
  }
}

// out[few][whole vectors of columns]
void Sums(const Call& a, bool skip_masked, bool clear, const float* factor) {
  const auto row = static_cast<ptrdiff_t>((a.columns + N - 1) / N * N);
  WithFew(a.few, [&](auto r) {
    if (skip_masked) {
      hs::SumPairRows<r.value, true>(d, a.stored(), a.columns, a.pairs, clear, factor, a.out, row);
    } else {
      hs::SumPairRows<r.value, false>(d, a.stored(), a.columns, a.pairs, clear, factor, a.out, row);
    }
  });
}

// One channel, its pairs of rows in `words`: out[lane].
void SumByTile(const uint32_t* words, const Call& a, bool skip_masked, bool clear, const float* factor, float* out) {
  const hn::Vec<decltype(d)> rescale[1] = {hn::Load(d, factor)};
  const size_t pairs = (a.count + 1) / 2;
  if (skip_masked) {
    hs::ValuePairTile<1, 1, true>(d, a.pairs, N, words, 1, pairs, clear, rescale, out);
  } else {
    const auto weights = hwy::AllocateAligned<uint32_t>(pairs * N);
    std::copy_n(a.pairs, pairs * N, weights.get());
    hs::ArrangeLanes(d, weights.get(), N, pairs, N);
    hs::ValuePairTile<1, 1, false>(d, weights.get(), N, words, 1, pairs, clear, rescale, out);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::pair_row_tile_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HEED_PAIR_TARGET

#if HWY_ONCE && (HWY_TARGETS & HEED_PAIR_TARGET)
namespace heed::pair_row_tile_test {
namespace {

using HEED_PAIR_NAMESPACE::Call;
using HEED_PAIR_NAMESPACE::N;

class PairRowTileTest : public testing::Test {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & HEED_PAIR_CPUS) == 0) GTEST_SKIP() << "this CPU has no bf16 dot product";
  }

  template <class F>
  void ForShapes(const F& f) {
    uint64_t seed = 1;
    for (int few = 1; few <= std::min<int>(8, N); few *= 2) {
      for (const int64_t count : {1, 3, 16, 17, 64, 67, 128}) {
        for (const int64_t columns : {1, 5, 16, 31, 32, 33, 64, 128, 161}) {
          SCOPED_TRACE("few " + std::to_string(few) + " count " + std::to_string(count) + " columns " +
                       std::to_string(columns));
          Random random(seed++);
          const Buffer rows(DType::kBF16, {count, columns},
                            random.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard);
          rows.FillNormal(random.Word());
          f(random, few, static_cast<size_t>(count), static_cast<size_t>(columns), rows.as<BF16>());
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  // Words of two bf16 each.
  static Buffer Pairs(size_t rows, uint64_t seed) {
    const Buffer pairs(DType::kBF16, {static_cast<int64_t>(rows * 2 * N)});
    pairs.FillNormal(seed);
    return pairs;
  }
};

bool Same(const float* a, const float* b) { return std::memcmp(a, b, sizeof(float)) == 0; }

TEST_F(PairRowTileTest, DotsAreThoseOfTiles) {
  ForShapes([](Random& random, int few, size_t count, size_t columns, const BF16* rows) {
    const Buffer pairs = Pairs((columns + 1) / 2, random.Word());
    const auto size = static_cast<int64_t>(count * N);
    const Buffer out(DType::kF32, {size}), expected(DType::kF32, {size});
    Call call = {few, rows, count, columns, reinterpret_cast<const uint32_t*>(pairs.as<BF16>()), out.as<float>()};
    HEED_PAIR_NAMESPACE::Dots(call);
    call.out = expected.as<float>();
    HEED_PAIR_NAMESPACE::DotsByTile(call);
    for (size_t j = 0; j < count; ++j) {
      for (size_t r = 0; r < static_cast<size_t>(few); ++r) {
        ASSERT_TRUE(Same(out.as<float>() + j * N + r, call.out + j * N + r)) << "row " << j << " of few " << r;
      }
    }
  });
}

TEST_F(PairRowTileTest, SumsAreThoseOfTiles) {
  ForShapes([](Random& random, int few, size_t count, size_t columns, const BF16* rows) {
    const size_t num_pairs = (count + 1) / 2, row = (columns + N - 1) / N * N;
    const Buffer pairs = Pairs(num_pairs, random.Word());
    BF16* weights = pairs.as<BF16>();
    for (size_t i = 0; i < num_pairs * 2 * N; ++i) {
      if (random.Chance(0.2)) weights[i].bits = 0x8000;  // -0: masked
      // No weight for a row that is not there.
      if (count % 2 != 0 && i >= (num_pairs - 1) * 2 * N && i % 2 != 0) weights[i].bits = 0;
    }
    const Buffer factor(DType::kF32, {static_cast<int64_t>(N)});
    factor.FillNormal(random.Word());
    const Buffer out(DType::kF32, {few, static_cast<int64_t>(row)});
    const bool skip_masked = random.Chance(0.5), clear = random.Chance(0.5);
    out.FillNormal(random.Word());
    const std::vector<float> before(out.as<float>(), out.as<float>() + static_cast<size_t>(few) * row);
    const Call call = {few, rows, count, columns, reinterpret_cast<const uint32_t*>(weights), out.as<float>()};
    HEED_PAIR_NAMESPACE::Sums(call, skip_masked, clear, factor.as<float>());
    for (size_t e = 0; e < columns; ++e) {
      std::vector<uint32_t> words(num_pairs);
      for (size_t j = 0; j < count; ++j) {
        words[j / 2] |= uint32_t{rows[j * columns + e].bits} << (j % 2 * 16);
      }
      alignas(64) float expected[N] = {};
      for (size_t r = 0; r < static_cast<size_t>(few); ++r) expected[r] = before[r * row + e];
      HEED_PAIR_NAMESPACE::SumByTile(words.data(), call, skip_masked, clear, factor.as<float>(), expected);
      for (size_t r = 0; r < static_cast<size_t>(few); ++r) {
        ASSERT_TRUE(Same(out.as<float>() + r * row + e, expected + r)) << "row " << r << " column " << e;
      }
    }
  });
}

}  // namespace
}  // namespace heed::pair_row_tile_test
#endif  // HWY_ONCE && (HWY_TARGETS & HEED_PAIR_TARGET)
