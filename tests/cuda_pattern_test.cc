// Patterns and segments of attention on devices: masks agree with the reference, whichever rows share a block.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "heed/patterns/pattern.h"
#include "tests/cuda/attention_on_devices.h"

namespace heed {
namespace {

class CudaPatternTest : public CudaTest {
 protected:
  // Compares a problem and its gradients with the reference.
  void Agrees(Problem p, const std::string& what) {
    attention::DescribeGradients(p, 5);
    const Comparison forward = CompareWithReference(p, Run(p));
    EXPECT_TRUE(forward.ok) << what << ": " << forward.message;
    const Comparison backward = CompareGradients(p, Gradients(p));
    EXPECT_TRUE(backward.ok) << what << ": " << backward.message;
  }
};

// Large-M and small-M blocks, of one head and several, with one m-fragment and two.
constexpr Sizes kSizes[] = {
    {1, 200, 260, 2, 1, 64, 64}, {2, 3, 700, 4, 2, 16, 16}, {1, 90, 150, 4, 1, 128, 128}, {1, 40, 170, 4, 2, 64, 64}};

TEST_P(CudaPatternTest, PatternsAgreeWithTheReference) {
  using namespace patterns;  // NOLINT
  const int64_t tokens[] = {0, 77, 150};
  const Pattern all[] = {
      SlidingWindow(20, 3), Strided(7),  Dilated(100, 4),  GlobalTokens(ConstTensorView(tokens, DType::kI64, {3})),
      BigBird(64, 1),       BigBird(16), Streaming(4, 30), Strided(64) | SlidingWindow(9)};
  int i = 0;
  for (const Pattern& pattern : all) {
    for (const Sizes& sizes : {kSizes[i % 4], kSizes[(i + 1) % 4]}) {
      if (LeavesOut(7)) continue;
      Problem p = Plain(i % 2 == 0 ? DType::kBF16 : DType::kF16, sizes, 7);
      p.options.pattern = pattern;
      p.options.causal = i % 3 == 0;
      Agrees(p, pattern.ToString());
    }
    ++i;
  }
}

TEST_P(CudaPatternTest, HeadsHaveTheirPatterns) {
  for (const Sizes& sizes : kSizes) {
    if (LeavesOut(2)) continue;
    Problem p = Plain(DType::kBF16, sizes, 7);
    std::vector<Pattern> heads;
    for (int64_t h = 0; h < sizes.Hq; ++h)
      heads.push_back(h % 2 == 0 ? patterns::SlidingWindow(10 + h) : patterns::Strided(3 + h));
    p.options.pattern = patterns::PerHead(heads);
    p.options.causal = true;
    Agrees(p, "by head");
  }
}

// A kernel's tiles begin at the first valid key, listed tiles at key 0.
TEST_P(CudaPatternTest, KeysMayBeginInATile) {
  // Every other tile is listed, as a whole: a kernel's tile has a part of one and none of the next.
  const Buffer keep(DType::kBool, {16, 16});
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 16; ++j) keep.Set({i, j}, (i + j) % 2);
  }
  for (const Sizes& sizes : kSizes) {
    for (const Pattern& pattern :
         {patterns::SlidingWindow(70) | patterns::Strided(64), patterns::Blocks(keep.view())}) {
      if (LeavesOut(3)) continue;
      Problem p = Plain(DType::kBF16, sizes, 7);
      const std::vector<int64_t> starts = {37, 5};
      p.options.key_starts = ConstTensorView(starts.data(), DType::kI64, {sizes.B});
      p.options.pattern = pattern;
      p.options.causal = pattern.ToString().find("window") != std::string::npos;
      Agrees(p, pattern.ToString());
    }
  }
}

// Most tiles are masked, and with them whole segments of 512 keys, of which small-M blocks compute no split.
TEST_P(CudaPatternTest, MostKeysAreKeptByNoRow) {
  for (const int64_t rows : {1, 5, 70}) {
    if (LeavesOut(2)) continue;
    Problem p = Plain(DType::kBF16, {2, rows, 2100, 2, 1, 16, 16}, 7);
    p.options.pattern = patterns::Streaming(4, 30);
    Agrees(p, "streaming");
    std::vector<int64_t> index;
    for (int64_t i = 0; i < 2 * rows; ++i) index.insert(index.end(), {(i * 37) % 60, 1500 + i, -1});
    p.options.pattern = patterns::Keys(ConstTensorView(index.data(), DType::kI64, {2, rows, 3}));
    Agrees(p, "keys");
  }
}

TEST_P(CudaPatternTest, SegmentsAgreeWithTheReference) {
  for (const Sizes& sizes : kSizes) {
    for (const bool with_pattern : {false, true}) {
      if (LeavesOut(3)) continue;
      Problem p = Plain(DType::kBF16, sizes, 7);
      std::vector<int32_t> q, k;
      for (int64_t b = 0; b < sizes.B; ++b) {
        for (int64_t i = 0; i < sizes.Tq; ++i)
          q.push_back(static_cast<int32_t>((i + sizes.Tk - sizes.Tq) / 70 - (i % 50 == 3 ? 9 : 0)));
        for (int64_t j = 0; j < sizes.Tk; ++j) k.push_back(static_cast<int32_t>((j + b) / 70 - (j % 45 == 7 ? 9 : 0)));
      }
      p.options.segments_q = ConstTensorView(q.data(), DType::kI32, {sizes.B, sizes.Tq});
      p.options.segments_k = ConstTensorView(k.data(), DType::kI32, {sizes.B, sizes.Tk});
      p.options.causal = true;
      if (with_pattern) p.options.pattern = patterns::Strided(3) | patterns::SlidingWindow(5);
      Agrees(p, with_pattern ? "segments and a pattern" : "segments");
    }
  }
}

// Lists of tiles end with one of a single key.
TEST_P(CudaPatternTest, ASegmentOfTheLastKeyAgreesWithTheReference) {
  Problem p = Plain(DType::kBF16, {1, 65, 65, 2, 1, 64, 64}, 7);
  std::vector<int32_t> ids(65);
  ids.back() = 1;
  p.options.segments_q = p.options.segments_k = ConstTensorView(ids.data(), DType::kI32, {1, 65});
  Agrees(p, "segments");
}

// In long segments most tiles belong to one segment: these are not masked, others are skipped.
TEST_P(CudaPatternTest, LongSegmentsHaveTheBitsOfPackedSequences) {
  Problem p = Plain(DType::kBF16, {1, 256, 256, 2, 1, 64, 64}, 7);
  std::vector<int32_t> ids;
  for (int i = 0; i < 256; ++i) ids.push_back(i / 128);
  p.options.segments_q = p.options.segments_k = ConstTensorView(ids.data(), DType::kI32, {1, 256});
  const Results segments = Run(p);
  Problem packed = Plain(DType::kBF16, {1, 256, 256, 2, 1, 64, 64}, 7);
  const int32_t offsets[] = {0, 128, 256};
  packed.options.cu_seqlens_q = ConstTensorView(offsets, DType::kI32, {3});
  packed.lse.sizes = {2, 256};
  EXPECT_TRUE(SameBits(segments.o.view(), Run(packed).o.view()));
}

TEST_P(CudaPatternTest, ARowsBitsAreItsOwn) {
  Problem all = Plain(DType::kBF16, {1, 150, 700, 4, 2, 64, 64}, 5);
  all.options.causal = true;
  all.options.pattern = patterns::Strided(64) | patterns::SlidingWindow(90);
  const Results expected = Run(all);
  for (const auto& [begin, end] : {std::pair{0, 1}, {7, 70}, {100, 150}, {149, 150}}) {
    const int64_t starts[] = {550 + begin};
    Problem some = all;
    some.in.q = all.in.q.Slice(1, begin, end);
    some.options.query_starts = ConstTensorView(starts, DType::kI64, {1});
    DescribeOutputs(some);
    const Results results = Run(some);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_EQ(results.lse.Get({0, h, i - begin}), expected.lse.Get({0, h, i})) << i << " " << h;
        for (int64_t e = 0; e < 64; ++e)
          ASSERT_EQ(results.o.Get({0, i - begin, h, e}), expected.o.Get({0, i, h, e})) << i << " " << h;
      }
    }
  }
}

TEST_P(CudaPatternTest, ExplainCountsWhatIsKept) {
  Problem p = Plain(DType::kBF16, {1, 128, 128, 1, 1, 16, 16}, 1);
  p.options.pattern = patterns::SlidingWindow(0);
  const Buffer mask(DType::kBool, {128, 128});
  mask.FillConstant(1);
  const DeviceTensor q(*GetParam(), p.in.q), k(*GetParam(), p.in.k), v(*GetParam(), p.in.v),
      device_mask(*GetParam(), mask.view());
  Options options = p.options;
  options.mask = device_mask.view();
  const attention::Explanation e = attention::Explain(ctx_, {q.view(), k.view(), v.view()}, options);
  EXPECT_EQ(e.kernel, KernelOfManyRows());
  EXPECT_EQ(e.flops, 2 * 32 * 128.0);
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaPatternTest, testing::ValuesIn(DevicesOfAttention()), NameOf);

}  // namespace
}  // namespace heed
