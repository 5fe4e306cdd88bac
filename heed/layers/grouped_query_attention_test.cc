// Rotary scalings that depend on a sequence's length, in a layer: the length is that of the sequence, not of the row,
// and keys in a cache keep their rotation.
#include "heed/layers/grouped_query_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/layers/layer_case.h"
#include "heed/layers/reference_internal.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::layers {
namespace {

using reference::Array;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kT = 13, kOriginal = 6, kHeads = 4, kKeyHeads = 2, kDim = 8, kWidth = 32;

GroupedQueryAttention::Config ConfigOf(RopeType type) {
  GroupedQueryAttention::Config config;
  config.width = kWidth;
  config.heads = kHeads;
  config.kv_heads = kKeyHeads;
  RotaryScaling scaling;
  scaling.rope_type = type;
  scaling.factor = 4;
  scaling.max_position_embeddings = kOriginal;
  if (type == RopeType::kLongrope) {
    scaling.max_position_embeddings = 4 * kOriginal;
    scaling.original_max_position_embeddings = kOriginal;
    scaling.short_factor = {1, 1.1, 1.2, 1.5};
    scaling.long_factor = {1.5, 2, 3, 4};
  }
  config.rotary = CacheRotary{RotaryPairs::kHalfSplit, {.base = 100, .scaling = scaling}};
  return config;
}

class LengthDependentRotaryTest : public testing::TestWithParam<RopeType> {
 protected:
  static Buffer Rows(std::vector<int64_t> sizes, uint64_t seed = 1) {
    return Buffer(DType::kF32, sizes).FillNormal(seed);
  }

  Buffer Result(const ConstTensorView& x, const Call& call = {}, State* state = nullptr) const {
    Context ctx(2);
    const Buffer y(DType::kF32, x.sizes());
    layer_.Forward(ctx, x, call, state, y.view());
    return y;
  }

  static ConstTensorView List(const std::vector<int64_t>& list) {
    return ConstTensorView(list.data(), DType::kI64, {std::ssize(list)});
  }

  // Heads of rows [1, T], rotated in calls that end at `bounds`, each by the length that it reaches.
  Array Rotated(const Array& rows, const std::string& name, int64_t heads, const std::vector<int64_t>& bounds) const {
    const Array all = reference::Product(rows, random_.weights(), {name + "_proj", heads * kDim, false})
                          .Reshaped({1, rows.sizes[1], heads, kDim});
    Array rotated(all.sizes);
    int64_t begin = 0;
    for (const int64_t end : bounds) {
      std::vector<int64_t> positions(static_cast<size_t>(end - begin));
      std::iota(positions.begin(), positions.end(), begin);
      TensorView to = rotated.view();
      RotaryReference(all.view().Slice(1, begin, end), List(positions), config_.rotary->pairs, config_.rotary->options,
                      to.Slice(1, begin, end));
      begin = end;
    }
    return rotated;
  }

  // The expected outputs of one sequence in calls that end at `bounds`.
  Array Expected(const Buffer& x, const std::vector<int64_t>& bounds) const {
    const Array rows(x.view());
    const Array q = Rotated(rows, "q", kHeads, bounds), k = Rotated(rows, "k", kKeyHeads, bounds);
    const Array v = reference::Product(rows, random_.weights(), {"v_proj", kKeyHeads * kDim, false})
                        .Reshaped({1, rows.sizes[1], kKeyHeads, kDim});
    attention::Options options;
    options.causal = true;
    Array o(q.sizes), y(rows.sizes);
    attention::Reference({q.view(), k.view(), v.view()}, options, {.o = o.view(), .lse = {}});
    reference::Product(o.Reshaped({1, rows.sizes[1], kWidth}), random_.weights(), {"o_proj", kWidth, false})
        .Store(y.view());
    return y;
  }

  GroupedQueryAttention::Config config_ = ConfigOf(GetParam());
  RandomWeights random_{WeightsOf<GroupedQueryAttention>(config_), DType::kF32, 3};
  GroupedQueryAttention layer_{config_, random_.weights()};
};

TEST_P(LengthDependentRotaryTest, WholeCallsAreRotatedByTheirLength) {
  for (const int64_t T : {kOriginal - 1, kOriginal, kOriginal + 1, kT}) {
    const Buffer x = Rows({1, T, kWidth});
    EXPECT_LT(Error(Result(x.view()).view(), std::as_const(*this).Expected(x, {T}).view()), 5e-6) << T;
  }
}

TEST_P(LengthDependentRotaryTest, ACallRotatesItsTokensByTheLengthThatItReachesAndNoOthers) {
  const Buffer x = Rows({1, kT, kWidth});
  const std::vector<int64_t> bounds = {4, 5, kOriginal, kOriginal + 1, 10, kT};
  const Array expected = Expected(x, bounds);
  State state = layer_.MakeState();
  int64_t begin = 0;
  for (const int64_t end : bounds) {
    const Buffer part = x.As(TensorView(x.as<float>() + begin * kWidth, DType::kF32, {1, end - begin, kWidth}));
    EXPECT_LT(Error(Result(part.view(), {}, &state).view(), expected.view().Slice(1, begin, end)), 5e-6) << end;
    begin = end;
  }
  EXPECT_GT(Error(Expected(x, {kT}).view(), expected.view()), 1e-3);  // beyond the original length the split matters
  const std::vector<int64_t> within = {2, 3, kOriginal};
  const Buffer short_x = x.As(TensorView(x.as<float>(), DType::kF32, {1, kOriginal, kWidth}));
  // Up to the original length it does not.
  EXPECT_LT(Error(Expected(short_x, within).view(), Expected(short_x, {kOriginal}).view()), 1e-12);
}

TEST_P(LengthDependentRotaryTest, ASequenceDoesNotSeeTheLengthOfItsRow) {
  const Buffer x = Rows({2, kT, kWidth});
  const std::vector<int64_t> lengths = {kOriginal, kT};
  Call padded;
  padded.lengths = List(lengths);
  State state = layer_.MakeState({.batch = 2});
  for (State* with : {static_cast<State*>(nullptr), &state}) {
    const Buffer y = Result(x.view(), padded, with);
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t length = lengths[static_cast<size_t>(b)];
      const Buffer own = x.As(TensorView(x.as<float>() + b * kT * kWidth, DType::kF32, {1, length, kWidth}));
      State alone = layer_.MakeState();
      EXPECT_TRUE(SameBits(y.view().Slice(0, b, b + 1).Slice(1, 0, length),
                           Result(own.view(), {}, with == nullptr ? nullptr : &alone).view()))
          << b;
    }
  }
  const std::vector<int64_t> bounds = {0, kOriginal, kT};
  Call packed;
  packed.cu_seqlens = List(bounds);
  const Buffer row = x.As(TensorView(x.as<float>(), DType::kF32, {1, kT, kWidth}));
  const Buffer y = Result(row.view(), packed), expected(DType::kF64, row.view().sizes());
  GroupedQueryAttention::Reference(config_, random_.weights(), row.view(), packed, expected.view());
  EXPECT_LT(Error(y.view(), expected.view()), 5e-6);
  const Buffer first = row.As(TensorView(row.as<float>(), DType::kF32, {1, kOriginal, kWidth}));
  EXPECT_TRUE(SameBits(y.view().Slice(1, 0, kOriginal), Result(first.view()).view()));
}

TEST_P(LengthDependentRotaryTest, WhatIsMissingIsNamedWhenTheLayerIsMade) {
  GroupedQueryAttention::Config config = config_;
  const bool longrope = GetParam() == RopeType::kLongrope;
  (longrope ? config.rotary->options.scaling.long_factor.clear() : config.rotary->options.scaling.factor.reset());
  EXPECT_THAT([&] { GroupedQueryAttention(config, random_.weights()); },
              ThrowsMessage<InvalidArgument>(
                  HasSubstr(longrope ? "scaling.long_factor has 0 numbers, expected 4" : "scaling.factor is missing")));
}

INSTANTIATE_TEST_SUITE_P(Types, LengthDependentRotaryTest, testing::Values(RopeType::kDynamic, RopeType::kLongrope),
                         [](const auto& of) { return of.param == RopeType::kDynamic ? "dynamic" : "longrope"; });

}  // namespace
}  // namespace heed::layers
