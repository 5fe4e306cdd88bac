// The paths of a call with a pattern: lists of tiles, one dense problem per residue where the pattern separates
// positions of different residues, or each row by itself where the pattern lists its keys.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "heed/harness/case.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::Not;

bool IsByResidue(Context& ctx, const Problem& p) {
  return Explain(ctx, p.in, p.options).why.find("by residue") != std::string::npos;
}

bool IsByRow(Context& ctx, const Problem& p) {
  return Explain(ctx, p.in, p.options).why.find("each row is a problem of its own") != std::string::npos;
}

bool IsByTile(Context& ctx, const Problem& p) {
  return Explain(ctx, p.in, p.options).why.find("rows that keep the same tile") != std::string::npos;
}

// Lists of up to `count` numbers below `most` for each row, in any order, for `heads` heads; 0 heads: no such axis.
Buffer RandomLists(const Problem& p, int64_t count, int64_t most, int64_t heads, uint64_t seed) {
  const int64_t B = p.in.q.size(0), Tq = p.in.q.size(1), H = std::max<int64_t>(heads, 1);
  std::vector<int64_t> shape = {B, Tq, count};
  if (heads > 0) shape.insert(shape.begin() + 2, heads);
  Buffer index(DType::kI64, shape);
  Random random(seed);
  std::vector<int64_t> all(static_cast<size_t>(std::max(most, count)));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i) < most ? static_cast<int64_t>(i) : -1;
  std::vector<int64_t> at(shape.size());
  for (int64_t row = 0; row < B * Tq * H; ++row) {
    at = {row / (Tq * H), row / H % Tq};
    if (heads > 0) at.push_back(row % H);
    at.push_back(0);
    for (int64_t i = 0; i < count; ++i) {
      std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(random.Integer(i, std::ssize(all) - 1))]);
      at.back() = i;
      SetElement(index.view(), at, random.Chance(.1) ? -1 : static_cast<double>(all[static_cast<size_t>(i)]));
    }
  }
  return index;
}

Pattern RandomKeys(const Problem& p, int64_t count, bool by_head, uint64_t seed) {
  const int64_t Tk = p.in.k.size(1);
  return patterns::Keys(RandomLists(p, count, Tk, by_head ? p.in.k.size(2) : 0, seed).view());
}

Pattern RandomRowBlocks(const Problem& p, int64_t count, int64_t block, int64_t heads, uint64_t seed) {
  const int64_t blocks = (p.in.k.size(1) + block - 1) / block;
  return patterns::RowBlocks(RandomLists(p, count, blocks, heads, seed).view(), block);
}

// Every step-th token, beginning with `first`.
TensorView Every(const TensorView& t, int64_t first, int64_t step) {
  const int64_t count = (t.size(1) - first + step - 1) / step;
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
  auto* data = static_cast<char*>(t.data()) + first * strides[1] * static_cast<int64_t>(SizeOf(t.dtype()));
  sizes[1] = count;
  strides[1] *= step;
  return TensorView(data, t.dtype(), sizes, strides);
}

// Adds options that these paths support beside the pattern, in six variants.
void ChooseOptions(Problem& p, const Sizes& size, int variant) {
  const auto ints = [&](int64_t value) {
    return KeepInts(p, std::vector<int64_t>(static_cast<size_t>(size.B), value));
  };
  p.options.causal = variant % 2 == 0;
  if (variant == 1) p.options.align = Align::kTopLeft;
  if (variant >= 2) p.options.sinks = KeepFloats(p, std::vector<double>(static_cast<size_t>(size.Hq), 0.3));
  if (variant == 3) p.options.query_starts = ints(-11);
  if (variant < 4) return;
  p.options.softcap = 4;
  p.options.key_starts = ints(size.Tk / 4);
  p.options.key_lengths = ints(size.Tk - size.Tk / 5);
  p.options.query_lengths = ints(size.Tq - size.Tq / 3);
}

class PatternPaths : public testing::TestWithParam<DType> {
 protected:
  Context ctx_{2};
};

TEST_P(PatternPaths, ResiduesHaveTheBitsOfEveryStepthToken) {
  for (const int64_t step : {2, 5, 64}) {
    for (const bool causal : {false, true}) {
      Problem p = MakeProblem(GetParam(), {.B = 2, .Tq = 203, .Tk = 203, .Hq = 4, .Hkv = 2, .D = 24, .Dv = 20});
      p.options.causal = causal;
      p.options.pattern = patterns::Dilated(9, step);
      ASSERT_TRUE(IsByResidue(ctx_, p));
      const Result whole = RunForward(ctx_, p);
      for (int64_t r = 0; r < step; ++r) {
        Problem part = p;
        part.options.pattern = {};
        part.options.window = {9, 9};
        for (ConstTensorView* t : {&part.in.q, &part.in.k, &part.in.v}) {
          *t = Every(TensorView(const_cast<void*>(t->data()), t->dtype(), t->sizes(), t->strides()), r, step);
        }
        DescribeOutputs(part);
        EXPECT_EQ(Difference(Every(whole.o.view(), r, step), RunForward(ctx_, part).o.view()), "") << step << " " << r;
      }
    }
  }
}

// Covers any numbers of rows and keys, including residues without any.
TEST_P(PatternPaths, ResiduesAgreeWithTheReferenceForwardAndBackward) {
  const Sizes sizes[] = {{.B = 2, .Tq = 70, .Tk = 70, .Hq = 2, .Hkv = 1, .D = 8, .Dv = 12},
                         {.B = 1, .Tq = 5, .Tk = 150, .Hq = 2, .Hkv = 2, .D = 16, .Dv = 16},
                         {.B = 2, .Tq = 90, .Tk = 33, .Hq = 4, .Hkv = 2, .D = 8, .Dv = 8},
                         {.B = 1, .Tq = 1, .Tk = 9, .Hq = 1, .Hkv = 1, .D = 4, .Dv = 4}};
  const Pattern patterns[] = {patterns::Dilated(3, 2),
                              patterns::Dilated(0, 7),
                              patterns::Dilated(2, 100),
                              patterns::Atrous(3),
                              patterns::Atrous(33),
                              patterns::Strided(5),
                              patterns::SlidingWindow(7, 3) | patterns::Dilated(4, 3),
                              patterns::Atrous(6) | patterns::SlidingWindow(0, 13),
                              patterns::SlidingWindow(20, 9) | patterns::Dilated(3, 8)};
  uint64_t seed = 1;
  for (const Sizes& size : sizes) {
    for (const Pattern& pattern : patterns) {
      for (int variant = 0; variant < 6; ++variant, ++seed) {
        Problem p = MakeProblem(GetParam(), size, seed);
        p.options.pattern = pattern;
        ChooseOptions(p, size, variant);
        ASSERT_TRUE(IsByResidue(ctx_, p));
        const Comparison forward = Compare(MakeCase(p), ctx_);
        EXPECT_TRUE(forward.ok) << Title(p) << ": " << forward.message;
        const Problem trained = WithGradients(p, seed);
        const Comparison backward = Compare(MakeBackwardCase(trained, false), ctx_);
        EXPECT_TRUE(backward.ok) << Title(trained) << ": " << backward.message;
      }
    }
  }
}

TEST_P(PatternPaths, BitsOfResiduesDoNotDependOnThreadsStridesSplitsOrPacking) {
  for (const Pattern& pattern : {patterns::Dilated(11, 3), patterns::Strided(7)}) {
    Context one(1);
    Problem p = MakeProblem(GetParam(), {.B = 3, .Tq = 130, .Tk = 130, .Hq = 4, .Hkv = 2, .D = 16, .Dv = 24});
    p.options.causal = true;
    p.options.pattern = pattern;
    const Result all = RunForward(ctx_, p);
    EXPECT_EQ(Difference(all, RunForward(one, p)), "");
    EXPECT_EQ(Difference(all, RunForward(ctx_, Restrided(p, 5))), "");
    for (int64_t b = 0; b < 3; ++b) {
      EXPECT_EQ(Difference(all.o.view().Slice(0, b, b + 1), RunForward(ctx_, OneSequence(p, b)).o.view()), "");
    }
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 64}, {64, 129}, {129, 130}}) {
      const Result some = RunForward(ctx_, SomeQueries(p, begin, end));
      EXPECT_EQ(Difference(all.o.view().Slice(1, begin, end), some.o.view()), "") << begin;
    }
    const std::optional<Problem> packed = Packed(p);
    ASSERT_TRUE(packed.has_value());
    const Result joined = RunForward(ctx_, *packed);
    for (int64_t b = 0; b < 3; ++b) {
      const int axis = joined.o.view().rank() - 3;
      const TensorView rows = joined.o.view().Slice(axis, b * 130, (b + 1) * 130);
      const TensorView expected = all.o.view().Slice(0, b, b + 1);
      for (int64_t t = 0; t < 130; ++t) {
        for (int64_t h = 0; h < 4; ++h) {
          for (int64_t e = 0; e < 24; ++e) {
            const std::vector<int64_t> at =
                axis == 1 ? std::vector<int64_t>{0, t, h, e} : std::vector<int64_t>{t, h, e};
            ASSERT_EQ(GetElement(rows, at), GetElement(expected, std::vector<int64_t>{0, t, h, e}));
          }
        }
      }
    }
  }
}

// Covers groups of query heads within and beyond the decoding kernels' size, keys per head and for all heads, and more
// keys than one copy holds.
TEST_P(PatternPaths, ListedKeysAgreeWithTheReferenceForwardAndBackward) {
  const Sizes sizes[] = {{.B = 2, .Tq = 70, .Tk = 90, .Hq = 2, .Hkv = 1, .D = 8, .Dv = 12},
                         {.B = 1, .Tq = 5, .Tk = 300, .Hq = 2, .Hkv = 2, .D = 16, .Dv = 16},
                         {.B = 2, .Tq = 9, .Tk = 33, .Hq = 24, .Hkv = 2, .D = 8, .Dv = 8},
                         {.B = 1, .Tq = 150, .Tk = 150, .Hq = 4, .Hkv = 2, .D = 20, .Dv = 4},
                         {.B = 1, .Tq = 1, .Tk = 9, .Hq = 1, .Hkv = 1, .D = 4, .Dv = 4}};
  uint64_t seed = 1;
  for (const Sizes& size : sizes) {
    for (const int64_t count : {1, 7, 100}) {
      for (int variant = 0; variant < 6; ++variant, ++seed) {
        Problem p = MakeProblem(GetParam(), size, seed);
        p.options.pattern = RandomKeys(p, count, variant % 3 == 0, seed);
        ChooseOptions(p, size, variant);
        ASSERT_TRUE(IsByRow(ctx_, p));
        const Comparison forward = Compare(MakeCase(p), ctx_);
        EXPECT_TRUE(forward.ok) << Title(p) << ": " << forward.message;
        const Problem trained = WithGradients(p, seed);
        const Comparison backward = Compare(MakeBackwardCase(trained, false), ctx_);
        EXPECT_TRUE(backward.ok) << Title(trained) << ": " << backward.message;
      }
    }
  }
}

TEST_P(PatternPaths, BitsOfListedKeysDoNotDependOnThreadsStridesOrNeighbours) {
  Context one(1);
  for (const bool by_head : {false, true}) {
    Problem p = MakeProblem(GetParam(), {.B = 3, .Tq = 130, .Tk = 130, .Hq = 4, .Hkv = 2, .D = 16, .Dv = 24});
    p.options.causal = true;
    p.options.pattern = RandomKeys(p, 90, by_head, 3);
    const Result all = RunForward(ctx_, p);
    EXPECT_EQ(Difference(all, RunForward(one, p)), "");
    EXPECT_EQ(Difference(all, RunForward(ctx_, Restrided(p, 5))), "");
    const Problem trained = WithGradients(p, 7);
    const auto gradients = RunBackward(ctx_, trained);
    EXPECT_EQ(Difference(gradients, RunBackward(one, trained)), "");
    // Takes the first sequence alone, whose keys come first.
    Problem first = OneSequence(p, 0);
    first.options.pattern = RandomKeys(first, 90, by_head, 3);
    EXPECT_EQ(Difference(all.o.view().Slice(0, 0, 1), RunForward(ctx_, first).o.view()), "");
  }
}

// Covers whole tiles beside absent tiles, for every way in which kernels divide keys into tiles.
TEST_P(PatternPaths, BlocksHaveTheBitsOfTheirMask) {
  for (const int64_t block : {16, 64, 128}) {
    Problem p = MakeProblem(GetParam(), {.B = 1, .Tq = 500, .Tk = 500, .Hq = 1, .Hkv = 1, .D = 16, .Dv = 16});
    const int64_t n = (500 + block - 1) / block;
    const Buffer keep(DType::kBool, {n, n}), mask(DType::kBool, {1, 1, 500, 500});
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) keep.Set({i, j}, (i + j) % 3 == 0);
    }
    for (int64_t i = 0; i < 500; ++i) {
      for (int64_t j = 0; j < 500; ++j) mask.Set({0, 0, i, j}, (i / block + j / block) % 3 == 0);
    }
    Problem masked = p;
    p.options.pattern = patterns::Blocks(keep.view(), block);
    masked.options.mask = Keep(masked, mask);
    EXPECT_EQ(Difference(RunForward(ctx_, p), RunForward(ctx_, masked)), "") << block;
    EXPECT_EQ(Difference(RunBackward(ctx_, WithGradients(p, 7)), RunBackward(ctx_, WithGradients(masked, 7))), "")
        << block;
    const Comparison forward = Compare(MakeCase(p), ctx_);
    EXPECT_TRUE(forward.ok) << forward.message;
  }
}

// Groups of keys add to a row's gradient in an ordered reduction. Counting a group that the row skips would wait
// forever.
TEST_P(PatternPaths, GroupsOfKeysBetweenThoseThatARowKeepsHoldNobodyUp) {
  Problem p = MakeProblem(GetParam(), {.B = 1, .Tq = 1100, .Tk = 1100, .Hq = 1, .Hkv = 1, .D = 8, .Dv = 8});
  p.options.pattern = patterns::Streaming(3, 70);
  const Comparison backward = Compare(MakeBackwardCase(WithGradients(p, 7), false), ctx_);
  EXPECT_TRUE(backward.ok) << backward.message;
}

// Covers everything that shares vector lanes: heads of a group or none, odd numbers of rows, partial tiles, and
// non-finite values that no row sees.
TEST_P(PatternPaths, RowBlocksHaveTheBitsOfTheirTiles) {
  const Sizes sizes[] = {{.B = 2, .Tq = 300, .Tk = 300, .Hq = 4, .Hkv = 2, .D = 24, .Dv = 20},
                         {.B = 1, .Tq = 203, .Tk = 1200, .Hq = 1, .Hkv = 1, .D = 16, .Dv = 16},
                         {.B = 1, .Tq = 211, .Tk = 700, .Hq = 3, .Hkv = 1, .D = 8, .Dv = 40},
                         {.B = 2, .Tq = 41, .Tk = 640, .Hq = 8, .Hkv = 2, .D = 12, .Dv = 8}};
  uint64_t seed = 1;
  for (const Sizes& size : sizes) {
    for (const int64_t block : {64, 16, 100, 128}) {
      for (int variant = 0; variant < 6; ++variant, ++seed) {
        Problem p = MakeProblem(GetParam(), size, seed);
        const int64_t heads[] = {0, 1, size.Hkv, size.Hq};
        p.options.pattern = RandomRowBlocks(p, 2, block, heads[seed % 4], seed);
        ChooseOptions(p, size, variant);
        if (variant == 4) p.options.key_starts = KeepInts(p, std::vector<int64_t>(static_cast<size_t>(size.B), 128));
        p.options.invariant = true;
        if (variant == 5) {
          TensorView v(const_cast<void*>(p.in.v.data()), p.in.v.dtype(), p.in.v.sizes(), p.in.v.strides());
          SetElement(v, std::vector<int64_t>{0, size.Tk / 2, 0, 1}, std::numeric_limits<double>::infinity());
        }
        ASSERT_EQ(IsByTile(ctx_, p), size.Tk / 4 % 64 == 0 || variant != 5) << Title(p);
        Problem tiles = p;
        tiles.options.pattern = p.options.pattern & patterns::SlidingWindow(1 << 20, 1 << 20);
        ASSERT_FALSE(IsByTile(ctx_, tiles));
        EXPECT_EQ(Difference(RunForward(ctx_, p), RunForward(ctx_, tiles)), "") << Title(p);
        EXPECT_EQ(Difference(RunBackward(ctx_, WithGradients(p, seed)), RunBackward(ctx_, WithGradients(tiles, seed))),
                  "")
            << Title(p);
        if (variant == 5) continue;
        const Comparison forward = Compare(MakeCase(p), ctx_);
        EXPECT_TRUE(forward.ok) << Title(p) << ": " << forward.message;
      }
    }
  }
}

TEST_P(PatternPaths, BitsOfRowBlocksDoNotDependOnThreadsOrStrides) {
  Context one(1), many(5);
  Problem p = MakeProblem(GetParam(), {.B = 1, .Tq = 1500, .Tk = 1500, .Hq = 2, .Hkv = 1, .D = 16, .Dv = 24});
  p.options.causal = true;
  p.options.pattern = RandomRowBlocks(p, 3, 64, 0, 3);
  ASSERT_TRUE(IsByTile(ctx_, p));
  const Result all = RunForward(one, p);
  EXPECT_EQ(Difference(all, RunForward(many, p)), "");
  EXPECT_EQ(Difference(all, RunForward(ctx_, Restrided(p, 5))), "");
  const Problem trained = WithGradients(p, 7);
  const auto gradients = RunBackward(one, trained);
  EXPECT_EQ(Difference(gradients, RunBackward(many, trained)), "");
  EXPECT_EQ(Difference(gradients, RunBackward(ctx_, trained)), "");
}

INSTANTIATE_TEST_SUITE_P(DTypes, PatternPaths, testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& value) { return std::string(Name(value.param)); });

TEST(PatternPathsTest, CostIsThatOfWhatIsKept) {
  Context ctx(1);
  Problem p = MakeProblem(DType::kF32, {.B = 1, .Tq = 4096, .Tk = 4096, .Hq = 1, .Hkv = 1, .D = 8, .Dv = 8});
  for (const auto& [pattern, share] :
       {std::pair{patterns::Dilated(256, 4), 1.3}, {patterns::Atrous(16), 1.1}, {patterns::Strided(64), 2.5}}) {
    p.options.pattern = pattern;
    const Explanation e = Explain(ctx, p.in, p.options);
    EXPECT_LE(e.visited_pairs, share * e.flops / (2 * 16)) << pattern.ToString();
    EXPECT_FALSE(e.invariant);
  }
  p.options.pattern = RandomRowBlocks(p, 4, 64, 0, 1);
  const Explanation blocks = Explain(ctx, p.in, p.options);
  EXPECT_LE(blocks.flops, 2 * 16 * 4 * 64 * 4096);
  EXPECT_LE(blocks.visited_pairs, 1.01 * blocks.flops / (2 * 16));
  EXPECT_TRUE(blocks.invariant);
  p.options.pattern = RandomKeys(p, 32, false, 1);
  const Explanation e = Explain(ctx, p.in, p.options);
  EXPECT_LE(e.flops, 2 * 16 * 32 * 4096);
  EXPECT_LE(e.visited_pairs, 1.1 * e.flops / (2 * 16));
  EXPECT_FALSE(e.invariant);
}

// Options that depend on neighbouring tokens need tiles of consecutive keys, with the bits of a mask.
TEST(PatternPathsTest, WhatDependsOnNeighboursKeepsItsTiles) {
  Context ctx(1);
  const Sizes size = {.B = 1, .Tq = 100, .Tk = 100, .Hq = 2, .Hkv = 2, .D = 8, .Dv = 8};
  const auto with = [&](const auto& change) {
    Problem p = MakeProblem(DType::kF32, size);
    p.options.causal = true;
    p.options.pattern = patterns::Atrous(4);
    change(p);
    return p;
  };
  EXPECT_TRUE(IsByResidue(ctx, with([](Problem&) {})));
  const Problem declined[] = {
      with([](Problem& p) { p.options.invariant = true; }),
      with([](Problem& p) { p.options.dropout = .1; }),
      with([](Problem& p) { p.options.window.left = 30; }),
      with([](Problem& p) { p.options.chunk = 30; }),
      with([](Problem& p) { p.options.alibi = KeepFloats(p, {.1, .2}); }),
      with([](Problem& p) { p.options.prefix = KeepInts(p, {5}); }),
      with([](Problem& p) { p.options.bias = Keep(p, Buffer(DType::kF32, {1, 1, 100, 100}).FillNormal(3)); }),
      with([](Problem& p) { p.options.pattern = patterns::Atrous(1); }),
      with([](Problem& p) { p.options.pattern = patterns::Atrous(1 << 20); }),
      with([](Problem& p) { p.options.pattern = patterns::Atrous(4) & patterns::SlidingWindow(9); })};
  for (const Problem& p : declined) {
    EXPECT_FALSE(IsByResidue(ctx, p)) << Title(p);
    const Comparison forward = Compare(MakeCase(p), ctx);
    EXPECT_TRUE(forward.ok) << Title(p) << ": " << forward.message;
  }
  Problem keys = with([](Problem& p) { p.options.pattern = RandomKeys(p, 9, false, 2); });
  EXPECT_TRUE(IsByRow(ctx, keys));
  keys.options.window.left = 30;
  EXPECT_FALSE(IsByRow(ctx, keys));
  const Comparison forward = Compare(MakeCase(keys), ctx);
  EXPECT_TRUE(forward.ok) << forward.message;
}

}  // namespace
}  // namespace heed::attention
