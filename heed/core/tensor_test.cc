// Views: the arguments that construction accepts, and overlap compared with brute force.
#include "heed/core/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bitset>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "heed/core/error.h"

namespace heed {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

TEST(TensorViewTest, ADefaultViewIsAbsentAndEmpty) {
  const ConstTensorView view;
  EXPECT_FALSE(view.present());
  EXPECT_FALSE(static_cast<bool>(view));
  EXPECT_EQ(view.rank(), 0);
  EXPECT_EQ(view.num_elements(), 0);
  EXPECT_EQ(view.ShapeString(), "[]");
}

TEST(TensorViewTest, RowMajorStrides) {
  float data[24] = {};
  const ConstTensorView view(data, DType::kF32, {2, 3, 4});
  EXPECT_THAT(std::vector(view.strides().begin(), view.strides().end()), ElementsAre(12, 4, 1));
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.ShapeString(), "[2,3,4]");
}

TEST(TensorViewTest, RankZeroHoldsOneElement) {
  float x = 3;
  const ConstTensorView view(&x, DType::kF32, std::span<const int64_t>());
  EXPECT_TRUE(view.present());
  EXPECT_EQ(view.num_elements(), 1);
  EXPECT_EQ(*view.as<float>(), 3);
}

TEST(TensorViewTest, RankAboveTheLimitIsRejected) {
  EXPECT_NO_THROW(ConstTensorView(nullptr, DType::kF32, {1, 1, 1, 1, 1, 1}));
  EXPECT_THAT([] { ConstTensorView(nullptr, DType::kF32, {1, 1, 1, 1, 1, 1, 1}); },
              ThrowsMessage<InvalidArgument>("tensor has rank 7, expected at most 6"));
}

TEST(TensorViewTest, AsManyStridesAsSizesAreNeeded) {
  EXPECT_THAT([] { ConstTensorView(nullptr, DType::kF32, {1, 2}, {1}); },
              ThrowsMessage<InvalidArgument>("tensor has 2 sizes and 1 strides, expected as many"));
}

TEST(TensorViewTest, NegativeSizesAreRejected) {
  for (const int64_t size : {int64_t{-1}, kMin}) {
    EXPECT_THAT([&] { ConstTensorView(nullptr, DType::kF32, {2, size, 3}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("expected sizes >= 0")));
    EXPECT_THAT([&] { ConstTensorView(nullptr, DType::kF32, {0, size}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("expected sizes >= 0")));
  }
}

TEST(TensorViewTest, SizesWhoseBytesOverflowAreRejected) {
  const auto rejected = [](DType dtype, std::vector<int64_t> sizes) {
    EXPECT_THAT([&] { ConstTensorView(nullptr, dtype, std::span(sizes)); },
                ThrowsMessage<InvalidArgument>(HasSubstr("expected fewer than 2^63 bytes")));
  };
  rejected(DType::kF32, {kMax});
  rejected(DType::kF64, {int64_t{1} << 60});
  rejected(DType::kF32, {int64_t{1} << 31, int64_t{1} << 31});
  rejected(DType::kBool, {int64_t{1} << 40, int64_t{1} << 40});
  rejected(DType::kBool, {2, kMax});
  rejected(DType::kF32, {0, int64_t{1} << 40, int64_t{1} << 40});
  EXPECT_NO_THROW(ConstTensorView(nullptr, DType::kBool, {kMax - 1}));
}

TEST(TensorViewTest, StridesWhoseReachOverflowsAreRejected) {
  const auto rejected = [](std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    EXPECT_THAT(
        [&] {
          ConstTensorView(nullptr, DType::kF32, std::span<const int64_t>(sizes), std::span<const int64_t>(strides));
        },
        ThrowsMessage<InvalidArgument>(HasSubstr("expected fewer than 2^63 bytes")));
  };
  rejected({2}, {kMax});
  rejected({2}, {kMin});
  rejected({2}, {-kMax});
  rejected({3, 3}, {kMax / 8, kMax / 8});
  rejected({int64_t{1} << 32, int64_t{1} << 32}, {0, 0});
}

TEST(TensorViewTest, StridesThatReachNothingMayBeAnything) {
  char byte = 0;
  const ConstTensorView one(&byte, DType::kF64, {1}, {kMax});
  EXPECT_EQ(one.Slice(0, 0, 1).data(), &byte);
  EXPECT_EQ(one.Slice(0, 1, 1).num_elements(), 0);
  EXPECT_FALSE(SelfOverlaps(one));
  const ConstTensorView none(&byte, DType::kF64, {0, 1000}, {1, kMax});
  EXPECT_EQ(none.Slice(1, 500, 600).num_elements(), 0);
  EXPECT_FALSE(SelfOverlaps(none));
  EXPECT_FALSE(Overlap(none, one));
  const int64_t big = int64_t{1} << 40;
  const ConstTensorView late_zero(&byte, DType::kF64, {big, big, 0}, {1, 1, 1});
  EXPECT_EQ(late_zero.num_elements(), 0);
  EXPECT_EQ(ConstTensorView(&byte, DType::kF32, {kMax, 4, 0}).num_elements(), 0);
}

TEST(TensorViewTest, SliceMovesTheDataAndKeepsTheStrides) {
  float data[24] = {};
  TensorView view(data, DType::kF32, {2, 3, 4});
  const TensorView slice = view.Slice(1, 1, 3).Slice(0, 1, 2);
  EXPECT_EQ(slice.data(), data + 12 + 4);
  EXPECT_EQ(slice.ShapeString(), "[1,2,4]");
  EXPECT_EQ(slice.stride(0), 12);
  const TensorView reversed(data + 23, DType::kF32, {24}, {-1});
  EXPECT_EQ(reversed.Slice(0, 2, 5).data(), data + 21);
  EXPECT_EQ(view.Slice(0, 2, 2).num_elements(), 0);
}

TEST(TensorViewTest, SlicesOutsideAreRejected) {
  float data[6] = {};
  const ConstTensorView view(data, DType::kF32, {2, 3});
  struct {
    int axis;
    int64_t begin, end;
  } constexpr kWrong[] = {{-1, 0, 1}, {2, 0, 1}, {0, -1, 1}, {0, 0, 3}, {1, 2, 1}, {1, kMin, kMax}};
  for (const auto& w : kWrong) {
    EXPECT_THAT([&] { view.Slice(w.axis, w.begin, w.end); },
                ThrowsMessage<InvalidArgument>(HasSubstr("of shape [2,3], expected a range inside it")));
  }
}

// Overlap is compared with sets of bytes.

constexpr size_t kArena = 1024;
using Bytes = std::bitset<kArena>;

struct Reached {
  Bytes bytes;
  bool twice = false;
};

Reached BruteForce(const ConstTensorView& view, const char* arena) {
  Reached r;
  if (view.num_elements() == 0) return r;
  std::vector<int64_t> index(static_cast<size_t>(view.rank()), 0);
  const int64_t element = static_cast<int64_t>(SizeOf(view.dtype()));
  for (;;) {
    int64_t at = static_cast<const char*>(view.data()) - arena;
    for (int i = 0; i < view.rank(); ++i) {
      at += index[static_cast<size_t>(i)] * view.stride(i) * element;
    }
    for (int64_t b = at; b < at + element; ++b) {
      r.twice = r.twice || r.bytes[static_cast<size_t>(b)];
      r.bytes.set(static_cast<size_t>(b));
    }
    int axis = view.rank() - 1;
    for (; axis >= 0; --axis) {
      if (++index[static_cast<size_t>(axis)] < view.size(axis)) break;
      index[static_cast<size_t>(axis)] = 0;
    }
    if (axis < 0) return r;
  }
}

ConstTensorView RandomView(std::mt19937& random, const char* arena) {
  constexpr DType kDTypes[] = {DType::kBool, DType::kF16, DType::kF32, DType::kF64};
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const DType dtype = kDTypes[pick(0, 3)];
  const int64_t element = static_cast<int64_t>(SizeOf(dtype));
  std::vector<int64_t> sizes, strides;
  const int64_t rank = pick(0, 3);
  for (int64_t i = 0; i < rank; ++i) {
    sizes.push_back(pick(0, 20) == 0 ? 0 : pick(1, 4));
    strides.push_back(pick(-8, 8));
  }
  // The view reaches at most 3 axes x 3 steps x 8 x 8 bytes = 576 to either side.
  const int64_t start = static_cast<int64_t>(kArena) / 2 + pick(-10, 10) * (pick(0, 1) != 0 ? 1 : element);
  int64_t low = start, high = start + element;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) continue;
    const int64_t reach = strides[i] * (sizes[i] - 1) * element;
    (reach < 0 ? low : high) += reach;
  }
  if (low < 0 || high > static_cast<int64_t>(kArena)) {
    return RandomView(random, arena);
  }
  return ConstTensorView(arena + start, dtype, std::span<const int64_t>(sizes), std::span<const int64_t>(strides));
}

TEST(OverlapTest, NeverMissesASharedByte) {
  const std::vector<char> arena(kArena);
  std::mt19937 random(7);
  int shared = 0, apart = 0, doubted = 0;
  for (int i = 0; i < 100000; ++i) {
    const ConstTensorView a = RandomView(random, arena.data());
    const ConstTensorView b = RandomView(random, arena.data());
    const bool truth = (BruteForce(a, arena.data()).bytes & BruteForce(b, arena.data()).bytes).any();
    const bool said = Overlap(a, b);
    ASSERT_EQ(said, Overlap(b, a));
    if (truth) {
      ASSERT_TRUE(said);
    }
    ++(truth ? shared : said ? doubted : apart);
  }
  EXPECT_GT(shared, 10000);
  EXPECT_GT(apart, 10000);
  RecordProperty("doubted", doubted);
}

TEST(OverlapTest, NeverMissesAnElementReachedTwice) {
  const std::vector<char> arena(kArena);
  std::mt19937 random(8);
  int twice = 0, once = 0;
  for (int i = 0; i < 100000; ++i) {
    const ConstTensorView view = RandomView(random, arena.data());
    const bool truth = BruteForce(view, arena.data()).twice;
    if (truth) {
      ASSERT_TRUE(SelfOverlaps(view));
    }
    ++(truth ? twice : once);
  }
  EXPECT_GT(twice, 10000);
  EXPECT_GT(once, 10000);
}

TEST(OverlapTest, IsExactWhereOneViewIsContiguousRows) {
  const std::vector<char> arena(kArena);
  std::mt19937 random(9);
  for (int i = 0; i < 20000; ++i) {
    const auto pick = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    // The views are two column ranges of one matrix, like slices of a fused projection.
    const int64_t rows = pick(1, 5), columns = pick(1, 12);
    const ConstTensorView matrix(arena.data(), DType::kF32, {rows, columns});
    const int64_t a0 = pick(0, columns - 1), a1 = pick(a0 + 1, columns);
    const int64_t b0 = pick(0, columns - 1), b1 = pick(b0 + 1, columns);
    const ConstTensorView a = matrix.Slice(1, a0, a1), b = matrix.Slice(1, b0, b1);
    ASSERT_EQ(Overlap(a, b), a0 < b1 && b0 < a1);
    ASSERT_FALSE(SelfOverlaps(a));
    const int64_t r = pick(0, rows);
    ASSERT_FALSE(Overlap(matrix.Slice(0, 0, r), matrix.Slice(0, r, rows)));
  }
}

TEST(OverlapTest, FusedProjectionSlicesDoNotOverlapInAnyLayout) {
  std::vector<float> data(2 * 5 * 3 * 4 * 8);  // [B, T, 3, H, D]
  const ConstTensorView fused(data.data(), DType::kF32, {2, 5, 3, 4, 8});
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_FALSE(SelfOverlaps(fused.Slice(2, i, i + 1)));
    for (int64_t j = 0; j < 3; ++j) {
      EXPECT_EQ(Overlap(fused.Slice(2, i, i + 1), fused.Slice(2, j, j + 1)), i == j);
      EXPECT_EQ(Overlap(fused.Slice(4, i, i + 1), fused.Slice(4, j, j + 1)), i == j);
    }
  }
}

TEST(OverlapTest, AbsentAndEmptyViewsOverlapNothing) {
  float data[4] = {};
  const ConstTensorView whole(data, DType::kF32, {4});
  EXPECT_FALSE(Overlap(ConstTensorView(), whole));
  EXPECT_FALSE(Overlap(whole, whole.Slice(0, 2, 2)));
  EXPECT_TRUE(Overlap(whole, whole));
  EXPECT_FALSE(SelfOverlaps(ConstTensorView()));
}

TEST(OverlapTest, RepeatedElementsOverlapThemselves) {
  float data[4] = {};
  EXPECT_TRUE(SelfOverlaps(ConstTensorView(data, DType::kF32, {2, 4}, {0, 1})));
  EXPECT_TRUE(SelfOverlaps(ConstTensorView(data, DType::kF32, {3, 2}, {1, 1})));
  EXPECT_FALSE(SelfOverlaps(ConstTensorView(data, DType::kF32, {1, 4}, {0, 1})));
  EXPECT_FALSE(SelfOverlaps(ConstTensorView(data + 3, DType::kF32, {4}, {-1})));
}

}  // namespace
}  // namespace heed
