// T5's bias and its gradient: published buckets, the reference, identities.
#include "heed/ops/positions/t5_bias.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr T5Direction kBoth[] = {T5Direction::kBidirectional, T5Direction::kCausal};

// A table of each bucket's own number, so that the bias shows the buckets.
Buffer Numbers(int64_t buckets) {
  const Buffer table(DType::kF64, {buckets, 1});
  for (int64_t k = 0; k < buckets; ++k) table.Set({k, 0}, static_cast<double>(k));
  return table;
}

Buffer Bias(const Buffer& table, int64_t Tq, int64_t Tk, T5Direction direction, const T5BiasOptions& options = {},
            int threads = 2) {
  Context ctx(threads);
  Buffer bias(table.view().dtype(), {table.view().size(1), Tq, Tk});
  T5Bias(ctx, table.view(), direction, options, bias.view());
  return bias;
}

Buffer Gradient(const Buffer& dbias, int64_t buckets, T5Direction direction, const T5BiasOptions& options = {},
                int threads = 2) {
  Context ctx(threads);
  Buffer dtable(dbias.view().dtype(), {buckets, dbias.view().size(0)});
  T5BiasBackward(ctx, dbias.view(), direction, options, dtable.view());
  return dtable;
}

// The keys `0, 1, 2, ... after` (or before) a query at which the bucket changes.
std::vector<int64_t> Starts(const Buffer& row, bool after) {
  std::vector<int64_t> starts;
  const int64_t T = row.view().size(2);
  const auto bucket = [&](int64_t n) { return row.Get({0, 0, after ? n : T - 1 - n}); };
  for (int64_t n = 1; n < T; ++n) {
    if (bucket(n) != bucket(n - 1)) starts.push_back(n);
  }
  return starts;
}

TEST(T5BiasTest, BucketsBeginAtThePublishedDistances) {
  // One query after all keys, then one before all of them.
  EXPECT_THAT(Starts(Bias(Numbers(32), 1, 400, T5Direction::kBidirectional), false),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91));
  EXPECT_THAT(Starts(Bias(Numbers(32), 1, 400, T5Direction::kCausal), false),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59,
                          67, 77, 87, 99, 113));
  EXPECT_THAT(Starts(Bias(Numbers(32), 1, 400, T5Direction::kBidirectional, {.top_left = true}), true),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91));
  EXPECT_THAT(Starts(Bias(Numbers(32), 1, 400, T5Direction::kCausal, {.top_left = true}), true), ElementsAre());
}

// The published formula as T5 computes it, in f32.
TEST(T5BiasTest, TheDefaultsAreTheF32Formula) {
  for (const T5Direction direction : kBoth) {
    const bool both = direction == T5Direction::kBidirectional;
    const int64_t nb = both ? 16 : 32, m = nb / 2;
    const Buffer bias = Bias(Numbers(32), 400, 400, direction);
    for (int64_t i = 0; i < 400; ++i) {
      for (int64_t j = 0; j < 400; ++j) {
        const int64_t n = both ? std::abs(j - i) : std::max<int64_t>(i - j, 0);
        int64_t bucket = n;
        if (n >= m) {
          const float log_ratio =
              std::log(static_cast<float>(n) / static_cast<float>(m)) / std::log(128.0f / static_cast<float>(m));
          bucket = std::min(nb - 1, m + static_cast<int64_t>(log_ratio * static_cast<float>(nb - m)));
        }
        if (both && j > i) bucket += nb;
        ASSERT_EQ(bias.Get({0, i, j}), static_cast<double>(bucket)) << i << " " << j;
      }
    }
  }
}

TEST(T5BiasTest, AgreesWithTheReference) {
  struct Size {
    int64_t buckets, max_distance, Tq, Tk;
  };
  for (const Size& n :
       {Size{32, 128, 70, 130}, Size{32, 128, 130, 70}, Size{4, 2, 5, 9}, Size{4, 3, 9, 5}, Size{8, 64, 1, 300},
        Size{12, 100, 33, 257}, Size{64, 256, 40, 900}, Size{32, 20, 50, 60}, Size{6, 1000, 3, 2000}}) {
    for (const T5Direction direction : kBoth) {
      for (const bool top_left : {false, true}) {
        for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
          T5BiasOptions options{.max_distance = n.max_distance, .top_left = top_left};
          // Buckets with a single distance must be below max_distance.
          if (direction == T5Direction::kCausal) options.max_distance += n.buckets;
          const Buffer table(dtype, {n.buckets, 3});
          table.FillNormal(1);
          const Buffer expected(dtype, {3, n.Tq, n.Tk});
          T5BiasReference(table.view(), direction, options, expected.view());
          EXPECT_TRUE(SameBits(Bias(table, n.Tq, n.Tk, direction, options).view(), expected.view()))
              << n.buckets << " " << n.max_distance << " " << n.Tq;
        }
      }
    }
  }
}

TEST(T5BiasTest, AnOddNumberOfBucketsIsLegalIfCausal) {
  const T5BiasOptions options{.max_distance = 10};
  const Buffer bias = Bias(Numbers(5), 1, 40, T5Direction::kCausal, options);
  // m = 2; 2 * 5^(1/3) = 3.4 and 2 * 5^(2/3) = 5.8.
  EXPECT_THAT(Starts(bias, false), ElementsAre(1, 2, 4, 6));
}

TEST(T5BiasTest, EntriesKeepTheirBits) {
  const Buffer table(DType::kF32, {2, 1});
  table.as<uint32_t>()[0] = 0x7FC12345;
  table.as<uint32_t>()[1] = 0x80000000;
  const Buffer bias = Bias(table, 1, 2, T5Direction::kCausal);
  EXPECT_EQ(bias.as<uint32_t>()[0], 0x80000000u);
  EXPECT_EQ(bias.as<uint32_t>()[1], 0x7FC12345u);
}

TEST(T5BiasBackwardTest, AgreesWithTheReferenceAndIsTheTranspose) {
  constexpr int64_t kH = 3, kTq = 37, kTk = 150, kBuckets = 32;
  for (const T5Direction direction : kBoth) {
    for (const bool top_left : {false, true}) {
      const T5BiasOptions options{.top_left = top_left};
      const Buffer table(DType::kF64, {kBuckets, kH});
      const Buffer dbias(DType::kF64, {kH, kTq, kTk});
      table.FillNormal(2);
      dbias.FillNormal(3);
      const Buffer bias = Bias(table, kTq, kTk, direction, options);
      const Buffer dtable = Gradient(dbias, kBuckets, direction, options);
      const Buffer exact(DType::kF64, {kBuckets, kH});
      T5BiasBackwardReference(dbias.view(), direction, options, exact.view());
      double left = 0, right = 0;
      for (int64_t h = 0; h < kH; ++h) {
        for (int64_t i = 0; i < kTq; ++i) {
          for (int64_t j = 0; j < kTk; ++j) left += dbias.Get({h, i, j}) * bias.Get({h, i, j});
        }
        for (int64_t k = 0; k < kBuckets; ++k) {
          right += dtable.Get({k, h}) * table.Get({k, h});
          // At most kTq * kTk terms of magnitude 5.
          EXPECT_NEAR(dtable.Get({k, h}), exact.Get({k, h}), 1e-11);
        }
      }
      EXPECT_NEAR(left, right, 1e-10);
      EXPECT_GT(std::fabs(left), 1);
    }
  }
}

// Sums of integers are exact in f64, so every dtype must give them exactly.
TEST(T5BiasBackwardTest, SumsOfIntegersAreExact) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Buffer ones(dtype, {2, 16, 16});
    ones.FillConstant(1);
    const Buffer dtable = Gradient(ones, 32, T5Direction::kCausal);
    EXPECT_EQ(dtable.Get({0, 0}), 16 * 17 / 2);  // the diagonal and above it
    for (int64_t n = 1; n < 16; ++n) {
      EXPECT_EQ(dtable.Get({n, 1}), static_cast<double>(16 - n));
    }
    for (int64_t k = 16; k < 32; ++k) EXPECT_EQ(dtable.Get({k, 1}), 0);
  }
  // 2^30 + 1 - 2^30, on one diagonal and on three of one bucket.
  const Buffer wide(DType::kF32, {2, 3, 4});
  wide.FillConstant(0);
  for (int64_t i = 0; i < 3; ++i) {
    const double value = i == 0 ? 0x1p30 : i == 1 ? 1 : -0x1p30;
    wide.Set({0, i, i}, value);
    wide.Set({1, 0, 1 + i}, value);
  }
  const Buffer dtable = Gradient(wide, 2, T5Direction::kCausal, {.top_left = true});
  EXPECT_EQ(dtable.Get({0, 0}), 1);
  EXPECT_EQ(dtable.Get({0, 1}), 1);
}

TEST(T5BiasTest, BitsDependOnNeitherThreadsNorStrides) {
  constexpr int64_t kH = 5, kTq = 70, kTk = 90, kBuckets = 32;
  const Buffer table(DType::kF32, {kBuckets, kH});
  table.FillNormal(4);
  const Buffer wide(DType::kF32, {kH, kBuckets * 2});
  const TensorView columns(wide.as<float>(), DType::kF32, {kBuckets, kH}, {2, 2 * kBuckets});
  wide.FillConstant(42);
  for (int64_t k = 0; k < kBuckets; ++k) {
    for (int64_t h = 0; h < kH; ++h) wide.Set({h, 2 * k}, table.Get({k, h}));
  }
  for (const T5Direction direction : kBoth) {
    const Buffer bias = Bias(table, kTq, kTk, direction, {}, 1);
    EXPECT_TRUE(SameBits(Bias(table, kTq, kTk, direction, {}, 4).view(), bias.view()));
    const Buffer gaps(DType::kF32, {kTq, kTk + 1, kH});
    gaps.FillConstant(42);
    const TensorView last(gaps.as<float>(), DType::kF32, {kH, kTq, kTk}, {1, (kTk + 1) * kH, kH});
    Context ctx(2);
    T5Bias(ctx, columns, direction, {}, last);
    EXPECT_TRUE(SameBits(last, bias.view()));
    EXPECT_EQ(gaps.Get({3, kTk, 2}), 42);

    const Buffer dtable = Gradient(bias, kBuckets, direction, {}, 1);
    EXPECT_TRUE(SameBits(Gradient(bias, kBuckets, direction, {}, 4).view(), dtable.view()));
    T5BiasBackward(ctx, last, direction, {}, columns);
    EXPECT_TRUE(SameBits(columns, dtable.view()));
    EXPECT_EQ(wide.Get({2, 5}), 42);
    for (int64_t k = 0; k < kBuckets; ++k) {  // back to the table
      for (int64_t h = 0; h < kH; ++h) wide.Set({h, 2 * k}, table.Get({k, h}));
    }
  }
}

TEST(T5BiasTest, EmptySizesAreLegalAndHaveNoGradient) {
  for (const auto& [H, Tq, Tk] : {std::tuple<int64_t, int64_t, int64_t>{0, 3, 4}, {2, 0, 4}, {2, 3, 0}}) {
    const Buffer table(DType::kF32, {32, H});
    EXPECT_NO_THROW(Bias(table, Tq, Tk, T5Direction::kCausal));
    const Buffer dtable = Gradient(Buffer(DType::kF32, {H, Tq, Tk}), 32, T5Direction::kCausal);
    for (int64_t k = 0; k < 32; ++k) {
      for (int64_t h = 0; h < H; ++h) EXPECT_EQ(dtable.Get({k, h}), 0);
    }
  }
  // A size of 0 makes the other sizes irrelevant.
  Context ctx(1);
  const int64_t huge = int64_t{1} << 30;
  const TensorView table(nullptr, DType::kF32, {huge, 0});
  const TensorView bias(nullptr, DType::kF32, {0, huge, huge});
  T5Bias(ctx, table, T5Direction::kCausal, {.max_distance = huge}, bias);
  T5BiasBackward(ctx, bias, T5Direction::kCausal, {.max_distance = huge}, table);
  const TensorView rows(nullptr, DType::kF32, {1, huge, 0});
  Gradient(Buffer().As(rows), 32, T5Direction::kCausal);
}

void ExpectMistake(const Buffer& table, T5Direction direction, const T5BiasOptions& options, const Buffer& bias,
                   const std::string& what) {
  Context ctx(1);
  EXPECT_THAT([&] { T5Bias(ctx, table.view(), direction, options, bias.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("t5_bias: " + what)));
}

TEST(T5BiasTest, MistakesAreNamed) {
  const Buffer table(DType::kF32, {32, 2}), bias(DType::kF32, {2, 3, 4});
  const T5Direction both = kBoth[0], causal = kBoth[1];
  ExpectMistake(Buffer(DType::kF32, {32}), both, {}, bias, "table has shape [32], expected [buckets, H]");
  ExpectMistake(Buffer(DType::kI32, {32, 2}), both, {}, bias, "table has dtype i32, expected f64, f32, bf16 or f16");
  ExpectMistake(Buffer(DType::kF32, {31, 2}), both, {}, bias, "buckets is 31, expected an even number of at least 4");
  ExpectMistake(Buffer(DType::kF32, {2, 2}), both, {}, bias, "buckets is 2, expected an even number of at least 4");
  ExpectMistake(Buffer(DType::kF32, {1, 2}), causal, {}, bias, "buckets is 1, expected at least 2");
  ExpectMistake(table, both, {.max_distance = 8}, bias, "max_distance is 8, expected more than the 8 distances");
  ExpectMistake(table, causal, {.max_distance = 16}, bias, "max_distance is 16, expected more than the 16 distances");
  ExpectMistake(table, causal, {.max_distance = int64_t{1} << 41}, bias, "max_distance is 2199023255552, expected ");
  ExpectMistake(table, both, {}, Buffer(DType::kF32, {3, 3, 4}), "bias has shape [3,3,4], expected [2, Tq, Tk]");
  ExpectMistake(table, both, {}, Buffer(DType::kF32, {2, 3}), "bias has shape [2,3], expected [2, Tq, Tk]");
  ExpectMistake(table, both, {}, Buffer(DType::kF64, {2, 3, 4}), "bias has dtype f64, expected f32 as table");
  ExpectMistake(table, both, {}, Buffer(), "bias is absent");
  ExpectMistake(table, both, {}, table.As(TensorView(table.as<float>(), DType::kF32, {2, 3, 4})),
                "bias overlaps table, expected memory of its own");
  ExpectMistake(table, both, {}, bias.As(TensorView(bias.as<float>(), DType::kF32, {2, 3, 4}, {12, 0, 1})),
                "bias has strides [12,0,1] for shape [2,3,4]");
  Context ctx(1);
  EXPECT_THAT(
      [&] { T5BiasBackward(ctx, bias.view(), both, {}, Buffer(DType::kF32, {32, 3}).view()); },
      ThrowsMessage<InvalidArgument>(HasSubstr("t5_bias_backward: dbias has shape [2,3,4], expected [3, Tq, Tk]")));
  EXPECT_THAT([&] { T5BiasBackward(ctx, bias.view(), both, {}, TensorView(bias.as<float>(), DType::kF32, {4, 2})); },
              ThrowsMessage<InvalidArgument>(HasSubstr("t5_bias_backward: dtable overlaps dbias")));
}

}  // namespace
}  // namespace heed
