// The meaning of attention's options by results worked out by hand: the keys that each option keeps, and the terms that
// are added to a logit. The reference and the kernels take the same tests, so that they cannot share an error.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>

#include "heed/core/philox.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

enum class Function { kReference, kForwardF64, kForwardF32 };

std::string NameOf(Function function) {
  switch (function) {
    case Function::kReference: return "Reference";
    case Function::kForwardF64: return "ForwardF64";
    default: return "ForwardF32";
  }
}

// Found by name lookup: prints the parameter of a test.
void PrintTo(Function function, std::ostream* os) { *os << NameOf(function); }

class Semantics : public testing::TestWithParam<Function> {
 protected:
  DType dtype() const { return GetParam() == Function::kForwardF32 ? DType::kF32 : DType::kF64; }
  double tolerance() const { return dtype() == DType::kF32 ? 2e-6 : 1e-14; }

  Result Compute(const Problem& p) {
    if (GetParam() == Function::kReference) return RunReference(p);
    Context ctx(1);
    return RunForward(ctx, p);
  }

  // One sequence, one head, all logits 0, v the identity: o[i, j] is 1 / n if row i keeps j among n keys, so o shows
  // the kept keys.
  Problem Flat(int64_t Tq, int64_t Tk, int64_t B = 1) {
    Problem p = MakeProblem(dtype(), {.B = B, .Tq = Tq, .Tk = Tk, .Hq = 1, .Hkv = 1, .D = 1, .Dv = Tk});
    p.memory[0].FillConstant(0);
    p.memory[2].FillConstant(0);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t j = 0; j < Tk; ++j) p.memory[2].Set({b, j, 0, j}, 1);
    }
    return p;
  }

  // "110 011" for the rows of sequence b. Checks the weights and lse too.
  std::string Picture(const Problem& p, int64_t b = 0) {
    const Result r = Compute(p);
    const int64_t Tq = p.in.q.size(1), Tk = p.in.v.size(3);
    std::string picture;
    for (int64_t i = 0; i < Tq; ++i) {
      if (i > 0) picture += ' ';
      int64_t n = 0;
      for (int64_t j = 0; j < Tk; ++j) {
        const bool kept = r.o.Get({b, i, 0, j}) > 0;
        picture += kept ? '1' : '0';
        n += kept;
      }
      for (int64_t j = 0; n > 0 && j < Tk; ++j) {
        const double o = r.o.Get({b, i, 0, j});
        EXPECT_TRUE(o == 0 || std::abs(o * static_cast<double>(n) - 1) < tolerance());
      }
      const double lse = r.lse.Get({b, 0, i});
      if (n == 0) {
        EXPECT_EQ(lse, -kInfinity);
      } else {
        EXPECT_NEAR(lse, std::log(static_cast<double>(n)), tolerance());
      }
    }
    return picture;
  }

  // With one query and one key, lse is the logit.
  double Logit(double q, double k, const Options& options, double* o = nullptr, double v = 1) {
    Problem p = MakeProblem(dtype(), {});
    p.options = options;
    p.memory[0].FillConstant(q);
    p.memory[1].FillConstant(k);
    p.memory[2].FillConstant(v);
    const Result r = Compute(p);
    if (o != nullptr) *o = r.o.Get({0, 0, 0, 0});
    return r.lse.Get({0, 0, 0});
  }
};

INSTANTIATE_TEST_SUITE_P(Attention, Semantics,
                         testing::Values(Function::kReference, Function::kForwardF64, Function::kForwardF32),
                         [](const auto& value) { return NameOf(value.param); });

TEST_P(Semantics, WithoutOptionsEveryKeyIsKept) { EXPECT_EQ(Picture(Flat(2, 3)), "111 111"); }

TEST_P(Semantics, CausalIsAlignedAtTheBottomRight) {
  Problem p = Flat(2, 4);
  p.options.causal = true;
  EXPECT_EQ(Picture(p), "1110 1111");
  p = Flat(4, 2);
  p.options.causal = true;
  EXPECT_EQ(Picture(p), "00 00 10 11");
}

TEST_P(Semantics, CausalCanBeAlignedAtTheTopLeft) {
  Problem p = Flat(2, 4);
  p.options.causal = true;
  p.options.align = Align::kTopLeft;
  EXPECT_EQ(Picture(p), "1000 1100");
}

TEST_P(Semantics, CausalCanStartAnywhere) {
  Problem p = Flat(2, 4, /*B=*/4);
  p.options.causal = true;
  p.options.align = Align::kTopLeft;  // query_starts take precedence
  p.options.query_starts = KeepInts(p, {1, -1, 9, -3});
  EXPECT_EQ(Picture(p, 0), "1100 1110");
  EXPECT_EQ(Picture(p, 1), "0000 1000");
  EXPECT_EQ(Picture(p, 2), "1111 1111");
  EXPECT_EQ(Picture(p, 3), "0000 0000");
}

TEST_P(Semantics, WindowCountsKeysBesideTheQuerysOwn) {
  Problem p = Flat(4, 4);
  p.options.window = {1, 0};
  EXPECT_EQ(Picture(p), "1000 1100 0110 0011");
  p.options.window = {0, 1};
  EXPECT_EQ(Picture(p), "1100 0110 0011 0001");
  p.options.window = {1, -1};
  EXPECT_EQ(Picture(p), "1111 1111 0111 0011");
  p.options.window = {-1, 1};
  EXPECT_EQ(Picture(p), "1100 1110 1111 1111");
  p.options.window = {0, 0};
  EXPECT_EQ(Picture(p), "1000 0100 0010 0001");
}

TEST_P(Semantics, WindowFollowsPositions) {
  Problem p = Flat(2, 5);  // positions 3 and 4
  p.options.window = {2, 0};
  EXPECT_EQ(Picture(p), "01110 00111");
}

TEST_P(Semantics, SinkTokensStayVisibleUnderAWindowButStayCausal) {
  Problem p = Flat(5, 5);
  p.options.window = {0, 0};
  p.options.sink_tokens = 2;
  EXPECT_EQ(Picture(p), "11000 11000 11100 11010 11001");
  p.options.causal = true;
  EXPECT_EQ(Picture(p), "10000 11000 11100 11010 11001");
}

TEST_P(Semantics, SinkTokensMeanNothingWithoutAWindow) {
  Problem p = Flat(2, 3);
  p.options.causal = true;
  p.options.sink_tokens = 2;
  EXPECT_EQ(Picture(p), "110 111");
}

TEST_P(Semantics, SinkTokensCountFromTheFirstValidKey) {
  Problem p = Flat(5, 5);
  p.options.window = {0, 0};
  p.options.sink_tokens = 1;
  p.options.key_starts = KeepInts(p, {2});
  EXPECT_EQ(Picture(p), "00100 00100 00100 00110 00101");
}

TEST_P(Semantics, PrefixIsVisibleToEveryQueryUnderCausal) {
  Problem p = Flat(4, 4);
  p.options.prefix = KeepInts(p, {2}, DType::kI32);
  EXPECT_EQ(Picture(p), "1111 1111 1111 1111");
  p.options.causal = true;
  EXPECT_EQ(Picture(p), "1100 1100 1110 1111");
  p.options.key_starts = KeepInts(p, {1});  // positions count from there
  EXPECT_EQ(Picture(p), "0110 0110 0110 0111");
}

TEST_P(Semantics, PrefixDoesNotOverrideTheWindow) {
  Problem p = Flat(4, 4);
  p.options.causal = true;
  p.options.prefix = KeepInts(p, {3});
  p.options.window = {0, 1};
  EXPECT_EQ(Picture(p), "1100 0110 0010 0001");
}

TEST_P(Semantics, ChunksDivideKeysAndDoNotImplyCausal) {
  Problem p = Flat(5, 5);
  p.options.chunk = 2;
  EXPECT_EQ(Picture(p), "11000 11000 00110 00110 00001");
  p.options.causal = true;
  EXPECT_EQ(Picture(p), "10000 11000 00100 00110 00001");
}

TEST_P(Semantics, ChunksCountFromTheFirstValidKeyOnBothSides) {
  Problem p = Flat(5, 5);
  p.options.chunk = 2;
  p.options.key_starts = KeepInts(p, {1});
  // Position 0 is in chunk -1, of which no key is valid.
  EXPECT_EQ(Picture(p), "00000 01100 01100 00011 00011");
}

TEST_P(Semantics, NegativePositionsAreInNegativeChunks) {
  Problem p = Flat(4, 4);
  p.options.chunk = 3;
  p.options.query_starts = KeepInts(p, {-2});
  EXPECT_EQ(Picture(p), "0000 0000 1110 1110");
}

TEST_P(Semantics, SegmentsAttendToTheirOwnUnlessNegative) {
  Problem p = Flat(4, 4);
  p.options.segments_q = Keep(p, Buffer(DType::kI64, {1, 4}));
  p.options.segments_k = Keep(p, Buffer(DType::kI32, {1, 4}));
  const int64_t q[] = {5, -1, 0, 7};
  const int32_t k[] = {0, 5, -1, 5};
  for (int64_t i = 0; i < 4; ++i) {
    p.memory[3].Set({0, i}, static_cast<double>(q[i]));
    p.memory[4].Set({0, i}, k[i]);
  }
  EXPECT_EQ(Picture(p), "0101 0000 1000 0000");
}

TEST_P(Semantics, KeyLengthsAndStartsMaskButMoveNoPosition) {
  Problem p = Flat(4, 4);
  p.options.key_lengths = KeepInts(p, {3});
  p.options.key_starts = KeepInts(p, {1}, DType::kI32);
  EXPECT_EQ(Picture(p), "0110 0110 0110 0110");
  p.options.causal = true;
  EXPECT_EQ(Picture(p), "0000 0100 0110 0110");
}

TEST_P(Semantics, RowsBeyondQueryLengthsAreEmpty) {
  Problem p = Flat(3, 2, /*B=*/2);
  p.options.query_lengths = KeepInts(p, {2, 0});
  EXPECT_EQ(Picture(p, 0), "11 11 00");
  EXPECT_EQ(Picture(p, 1), "00 00 00");
}

TEST_P(Semantics, MaskKeepsWhatIsTrueAndBroadcasts) {
  Problem p = Flat(3, 3);
  const Buffer keys(DType::kBool, {1, 3});  // [Tq = any, Tk]
  keys.Set({0, 0}, 1);
  keys.Set({0, 1}, 0);
  keys.Set({0, 2}, 1);
  p.options.mask = Keep(p, keys);
  EXPECT_EQ(Picture(p), "101 101 101");
  const Buffer rows(DType::kBool, {1, 1, 3, 1});
  rows.Set({0, 0, 0, 0}, 0);
  rows.Set({0, 0, 1, 0}, 1);
  rows.Set({0, 0, 2, 0}, 0);
  p.options.mask = Keep(p, rows);
  EXPECT_EQ(Picture(p), "000 111 000");
}

TEST_P(Semantics, ABiasOfMinusInfinityMasksAndFiniteMinimumDoesNot) {
  Problem p = Flat(3, 4);
  const Buffer bias(dtype(), {3, 4});
  bias.FillConstant(0);
  const double lowest = dtype() == DType::kF32 ? static_cast<double>(std::numeric_limits<float>::lowest())
                                               : std::numeric_limits<double>::lowest();
  bias.Set({0, 1}, -kInfinity);
  bias.Set({1, 2}, lowest);  // kept, but its weight underflows
  for (int64_t j = 0; j < 4; ++j) bias.Set({2, j}, lowest);
  p.options.bias = Keep(p, bias);
  const Result r = Compute(p);
  EXPECT_EQ(r.o.Get({0, 0, 0, 1}), 0);
  EXPECT_NEAR(r.o.Get({0, 0, 0, 0}), 1.0 / 3, tolerance());
  EXPECT_EQ(r.o.Get({0, 1, 0, 2}), 0);
  EXPECT_NEAR(r.o.Get({0, 1, 0, 0}), 1.0 / 3, tolerance());
  for (int64_t j = 0; j < 4; ++j) {  // equal logits share the weight
    EXPECT_NEAR(r.o.Get({0, 2, 0, j}), 0.25, tolerance());
  }
  EXPECT_NEAR(r.lse.Get({0, 0, 2}) / lowest, 1, tolerance());
}

TEST_P(Semantics, WeightsAreTheSoftmax) {
  Problem p = Flat(1, 3);
  const Buffer bias(DType::kF64, {1, 3});
  for (int64_t j = 0; j < 3; ++j) {
    bias.Set({0, j}, std::log(static_cast<double>(j + 1)));
  }
  p.options.bias = Keep(p, bias);
  const Result r = Compute(p);
  for (int64_t j = 0; j < 3; ++j) {
    EXPECT_NEAR(r.o.Get({0, 0, 0, j}), static_cast<double>(j + 1) / 6, tolerance());
  }
  EXPECT_NEAR(r.lse.Get({0, 0, 0}), std::log(6), tolerance());
}

TEST_P(Semantics, ScaleIsOneOverTheRootOfDUnlessGiven) {
  Problem p = MakeProblem(dtype(), {.D = 4});
  p.memory[0].FillConstant(1);
  p.memory[1].FillConstant(3);
  EXPECT_NEAR(Compute(p).lse.Get({0, 0, 0}), 12 / 2.0, 10 * tolerance());
  p.options.scale = -0.25;
  EXPECT_NEAR(Compute(p).lse.Get({0, 0, 0}), -3, 10 * tolerance());
  p.options.scale = 0;
  EXPECT_NEAR(Compute(p).lse.Get({0, 0, 0}), 0, tolerance());
}

TEST_P(Semantics, TermsComeInOrderScaleSoftcapAlibiBias) {
  Problem p;  // owns memory only
  Options o;
  o.scale = 0.5;
  o.softcap = 2;
  o.alibi = KeepFloats(p, {0.25});
  o.query_starts = KeepInts(p, {3});  // distance 3
  const Buffer bias(DType::kF16, {1, 1});
  bias.FillConstant(1.5);
  o.bias = Keep(p, bias);
  const double expected = 2 * std::tanh(0.5 * 3 * 4 / 2) - 0.25 * 3 + 1.5;
  EXPECT_NEAR(Logit(3, 4, o), expected, 10 * tolerance());
}

TEST_P(Semantics, AlibiIsSymmetricAndPerHead) {
  Problem p = MakeProblem(dtype(), {.B = 2, .Tq = 1, .Tk = 5, .Hq = 2, .Hkv = 1, .D = 1, .Dv = 1});
  p.memory[0].FillConstant(0);
  p.options.align = Align::kTopLeft;
  p.options.query_starts = KeepInts(p, {2, -1});
  const Buffer slopes(DType::kF64, {2, 2});
  slopes.Set({0, 0}, 0.5);
  slopes.Set({0, 1}, -0.25);
  slopes.Set({1, 0}, 2);
  slopes.Set({1, 1}, 0);
  p.options.alibi = Keep(p, slopes);
  const Result r = Compute(p);
  EXPECT_NEAR(r.lse.Get({0, 0, 0}), std::log(1 + 2 * std::exp(-0.5) + 2 * std::exp(-1.0)), 10 * tolerance());
  EXPECT_NEAR(r.lse.Get({0, 1, 0}), std::log(1 + 2 * std::exp(0.25) + 2 * std::exp(0.5)), 10 * tolerance());
  double sum = 0;
  for (int j = 0; j < 5; ++j) sum += std::exp(-2.0 * (j + 1));
  EXPECT_NEAR(r.lse.Get({1, 0, 0}), std::log(sum), 10 * tolerance());
  EXPECT_NEAR(r.lse.Get({1, 1, 0}), std::log(5), 10 * tolerance());
}

TEST_P(Semantics, ASinkTakesWeightButNoValueAndIsNotInTheLse) {
  Problem p;
  Options o;
  o.sinks = KeepFloats(p, {1.25});
  o.scale = 1;
  double out;
  EXPECT_NEAR(Logit(2, 1, o, &out, /*v=*/4), 2, 10 * tolerance());
  EXPECT_NEAR(out, 4 * std::exp(2) / (std::exp(2) + std::exp(1.25)), 10 * tolerance());
}

TEST_P(Semantics, InfiniteSinksTakeNothingOrAll) {
  Problem p;
  Options o;
  o.sinks = KeepFloats(p, {-kInfinity});
  double out;
  Logit(2, 1, o, &out, /*v=*/4);
  EXPECT_EQ(out, 4);
  o.sinks = KeepFloats(p, {kInfinity});
  EXPECT_NEAR(Logit(2, 1, o, &out, /*v=*/4), 2, 10 * tolerance());
  EXPECT_EQ(out, 0);
  o.sinks = KeepFloats(p, {300});  // far above and far below any logit
  Logit(2, 1, o, &out, /*v=*/4);
  EXPECT_NEAR(out, 0, 1e-30);
  o.sinks = KeepFloats(p, {-300});
  Logit(2, 1, o, &out, /*v=*/4);
  EXPECT_NEAR(out, 4, 10 * tolerance());
}

TEST_P(Semantics, HeadsShareKeyHeadsInContiguousGroups) {
  Problem p = MakeProblem(dtype(), {.B = 1, .Tq = 1, .Tk = 1, .Hq = 6, .Hkv = 2, .D = 1, .Dv = 1});
  p.memory[2].Set({0, 0, 0, 0}, 10);
  p.memory[2].Set({0, 0, 1, 0}, 20);
  const Result r = Compute(p);
  for (int64_t h = 0; h < 6; ++h) {
    EXPECT_NEAR(r.o.Get({0, 0, h, 0}), h < 3 ? 10 : 20, 20 * tolerance());
  }
}

TEST_P(Semantics, DropoutKeepsWhatPhiloxSays) {
  constexpr int64_t kB = 2, kHeads = 3, kTk = 9;
  Problem p = MakeProblem(dtype(), {.B = kB, .Tq = 2, .Tk = kTk, .Hq = kHeads, .Hkv = kHeads, .D = 1, .Dv = kTk});
  p.memory[0].FillConstant(0);
  p.memory[2].FillConstant(0);
  for (int64_t b = 0; b < kB; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t j = 0; j < kTk; ++j) p.memory[2].Set({b, j, h, j}, 1);
    }
  }
  p.options.dropout = 0.25;
  p.options.seed = 0x0123456789ABCDEF;
  p.options.dropout_offset = 77;
  p.options.query_starts = KeepInts(p, {5, (int64_t{1} << 32) - 1});
  const Result r = Compute(p);
  for (int64_t b = 0; b < kB; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < 2; ++i) {
        const uint32_t position = static_cast<uint32_t>((b == 0 ? 5u : 0xFFFFFFFFu) + i);
        for (int64_t j = 0; j < kTk; ++j) {
          const auto words = Philox({static_cast<uint32_t>(j / 4), position, static_cast<uint32_t>(b * kHeads + h), 77},
                                    {0x89ABCDEF, 0x01234567});
          const bool kept = words[static_cast<size_t>(j % 4)] < 0xC0000000u;
          EXPECT_NEAR(r.o.Get({b, i, h, j}), kept ? 1 / (0.75 * kTk) : 0, tolerance());
        }
        EXPECT_NEAR(r.lse.Get({b, h, i}), std::log(kTk), 10 * tolerance());
      }
    }
  }
}

TEST_P(Semantics, PackedSequencesDoNotSeeEachOther) {
  // Three sequences of 2, 0 and 1 queries on 1, 1 and 2 keys, and one row more.
  Problem p;
  const Buffer q(dtype(), {4, 1, 1}), k(dtype(), {5, 1, 1}), v(dtype(), {5, 1, 5});
  q.FillConstant(0);
  k.FillNormal(1);
  v.FillConstant(0);
  for (int64_t j = 0; j < 5; ++j) v.Set({j, 0, j}, 1);
  p.in = {Keep(p, q), Keep(p, k), Keep(p, v)};
  p.options.cu_seqlens_q = KeepInts(p, {0, 2, 2, 3}, DType::kI32);
  p.options.cu_seqlens_k = KeepInts(p, {0, 1, 2, 4});
  DescribeOutputs(p);
  const Result r = Compute(p);
  const double expected[4][5] = {{1, 0, 0, 0, 0}, {1, 0, 0, 0, 0}, {0, 0, 0.5, 0.5, 0}, {0, 0, 0, 0, 0}};
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      EXPECT_NEAR(r.o.Get({i, 0, j}), expected[i][j], tolerance());
    }
  }
  EXPECT_NEAR(r.lse.Get({0, 1}), 0, tolerance());
  EXPECT_NEAR(r.lse.Get({0, 2}), std::log(2), tolerance());
  EXPECT_EQ(r.lse.Get({0, 3}), -kInfinity);
}

TEST_P(Semantics, PackedPositionsBelongToTheSequence) {
  Problem p;
  const Buffer q(dtype(), {1, 4, 1, 1}), v(dtype(), {1, 4, 1, 4});
  q.FillConstant(0);
  v.FillConstant(0);
  for (int64_t j = 0; j < 4; ++j) v.Set({0, j, 0, j}, 1);
  p.in = {Keep(p, q), Keep(p, q), Keep(p, v)};
  p.options.cu_seqlens_q = KeepInts(p, {0, 1, 4});
  p.options.causal = true;
  p.options.window = {1, -1};
  DescribeOutputs(p);
  const Result r = Compute(p);
  std::string picture;
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 4; ++j) {
      picture += r.o.Get({0, i, 0, j}) > 0 ? '1' : '0';
    }
  }
  EXPECT_EQ(picture, "1000010001100011");
}

TEST_P(Semantics, ANanThatARowSeesMakesItNan) {
  for (const int64_t tensor : {0, 1}) {
    Problem p = Flat(2, 3);
    p.options.causal = true;  // rows see keys 0, 1 and 0, 1, 2
    if (tensor == 0) {
      p.memory[0].Set({0, 1, 0, 0}, kNaN);
    } else {
      p.memory[1].Set({0, 2, 0, 0}, kNaN);
    }
    const Result r = Compute(p);
    EXPECT_NEAR(r.o.Get({0, 0, 0, 0}), 0.5, tolerance());
    EXPECT_NEAR(r.lse.Get({0, 0, 0}), std::log(2), tolerance());
    for (int64_t d = 0; d < 3; ++d) {
      EXPECT_TRUE(std::isnan(r.o.Get({0, 1, 0, d})));
    }
    EXPECT_TRUE(std::isnan(r.lse.Get({0, 0, 1})));
  }
}

TEST_P(Semantics, ANanInVMakesThatComponentNan) {
  Problem p = Flat(2, 3);
  p.options.causal = true;
  p.memory[2].Set({0, 2, 0, 1}, kNaN);
  const Result r = Compute(p);
  EXPECT_NEAR(r.o.Get({0, 0, 0, 1}), 0.5, tolerance());
  EXPECT_NEAR(r.o.Get({0, 1, 0, 0}), 1.0 / 3, tolerance());
  EXPECT_TRUE(std::isnan(r.o.Get({0, 1, 0, 1})));
  EXPECT_NEAR(r.lse.Get({0, 0, 1}), std::log(3), tolerance());
}

TEST_P(Semantics, ALogitOfPlusInfinityMakesTheRowNan) {
  Problem p = Flat(1, 3);
  const Buffer bias(dtype(), {1, 3});
  bias.FillConstant(0);
  bias.Set({0, 1}, kInfinity);
  p.options.bias = Keep(p, bias);
  const Result r = Compute(p);
  EXPECT_TRUE(std::isnan(r.o.Get({0, 0, 0, 0})));
  EXPECT_TRUE(std::isnan(r.lse.Get({0, 0, 0})));
}

TEST_P(Semantics, ALogitOfMinusInfinityMasksItsValueToo) {
  Problem p = Flat(1, 3);
  p.memory[0].FillConstant(1);
  p.memory[1].FillConstant(0);
  p.memory[1].Set({0, 1, 0, 0}, -kInfinity);
  p.memory[2].Set({0, 1, 0, 0}, kNaN);
  const Result r = Compute(p);
  EXPECT_NEAR(r.o.Get({0, 0, 0, 0}), 0.5, tolerance());
  EXPECT_EQ(r.o.Get({0, 0, 0, 1}), 0);
  EXPECT_NEAR(r.lse.Get({0, 0, 0}), std::log(2), tolerance());
}

TEST_P(Semantics, ABiasOfMinusInfinityHidesANan) {
  Problem p = Flat(1, 3);
  const Buffer bias(dtype(), {1, 3});
  bias.FillConstant(0);
  bias.Set({0, 1}, -kInfinity);
  p.options.bias = Keep(p, bias);
  p.memory[1].Set({0, 1, 0, 0}, kNaN);
  p.memory[2].Set({0, 1, 0, 0}, kNaN);
  const Result r = Compute(p);
  EXPECT_NEAR(r.o.Get({0, 0, 0, 0}), 0.5, tolerance());
  EXPECT_NEAR(r.lse.Get({0, 0, 0}), std::log(2), tolerance());
}

}  // namespace
}  // namespace heed::attention
