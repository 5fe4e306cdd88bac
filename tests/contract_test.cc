// The contract of attention beyond agreement with the reference: bits that stay the same, inputs that must not matter,
// results at edges. Problems are random, so that the promises are tested in combination.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "heed/core/dispatch.h"
#include "heed/harness/unfair_executor.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Every dtype on every SIMD target.
using Param = std::tuple<DType, std::string>;

class Contract : public testing::TestWithParam<Param> {
 protected:
  Contract() { ctx_.set_isa(std::get<1>(GetParam())); }
  DType dtype() const { return std::get<0>(GetParam()); }

  // Calls f with random problems that are not packed and have an output.
  template <class F>
  void ForRandomProblems(int count, uint64_t first_seed, const F& f) {
    for (uint64_t seed = first_seed; count > 0; ++seed) {
      Problem p = RandomProblem(dtype(), seed);
      if (p.options.cu_seqlens_q || p.in.q.num_elements() == 0) continue;
      p.o.strides.clear();
      p.lse.strides.clear();
      if (p.lse.sizes.empty()) DescribeOutputs(p);
      SCOPED_TRACE(Title(p));
      f(p, seed);
      if (HasFailure()) return;
      --count;
    }
  }

  // Expects `part` to equal queries [begin, end) of a result.
  static void ExpectRows(const Result& whole, int64_t begin, int64_t end, const Result& part) {
    EXPECT_EQ(Difference(whole.o.view().Slice(1, begin, end), part.o.view()), "");
    EXPECT_EQ(Difference(whole.lse.view().Slice(2, begin, end), part.lse.view()), "");
  }

  Context ctx_{1};
};

std::vector<std::tuple<DType, std::string>> Combinations() {
  std::vector<std::tuple<DType, std::string>> all;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::string& target : AvailableTargets(dtype)) {
      all.emplace_back(dtype, target);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, Contract, testing::ValuesIn(Combinations()), [](const auto& value) {
  return std::string(Name(std::get<0>(value.param))) + "_" + std::get<1>(value.param);
});

TEST_P(Contract, BitsDoNotDependOnThreads) {
  ForRandomProblems(30, 1000, [&](const Problem& p, uint64_t seed) {
    const Result one = RunForward(ctx_, p);
    for (const int threads : {2, 3, 8}) {
      UnfairExecutor unfair(threads, seed);
      Context ctx(unfair.executor());
      ctx.set_isa(std::get<1>(GetParam()));
      EXPECT_EQ(Difference(one, RunForward(ctx, p)), "") << threads;
    }
    Context pool(4);
    pool.set_isa(std::get<1>(GetParam()));
    EXPECT_EQ(Difference(one, RunForward(pool, p)), "") << "own pool";
  });
}

TEST_P(Contract, BitsDoNotDependOnThreadsInALongProblem) {
  Problem p = MakeProblem(dtype(), {.B = 2, .Tq = 300, .Tk = 700, .Hq = 4, .Hkv = 2, .D = 24, .Dv = 40});
  p.options.causal = true;
  const Result one = RunForward(ctx_, p);
  for (int round = 0; round < 10; ++round) {
    for (const int threads : {2, 3, 8}) {
      UnfairExecutor unfair(threads, static_cast<uint64_t>(round));
      Context ctx(unfair.executor());
      ctx.set_isa(std::get<1>(GetParam()));
      EXPECT_EQ(Difference(one, RunForward(ctx, p)), "") << threads;
    }
  }
}

TEST_P(Contract, BitsDoNotDependOnAnUsedContext) {
  // Scratch contains the leftovers of another problem, NaN included.
  Problem poison = MakeProblem(dtype(), {.B = 1, .Tq = 70, .Tk = 200, .Hq = 2, .Hkv = 1, .D = 130, .Dv = 130});
  for (int i = 0; i < 3; ++i) {
    poison.memory[static_cast<size_t>(i)].FillConstant(kNaN);
  }
  ForRandomProblems(20, 1500, [&](const Problem& p, uint64_t) {
    Context fresh(1);
    fresh.set_isa(std::get<1>(GetParam()));
    const Result expected = RunForward(fresh, p);
    RunForward(ctx_, poison);
    EXPECT_EQ(Difference(expected, RunForward(ctx_, p)), "");
  });
}

TEST_P(Contract, BitsDoNotDependOnStrides) {
  ForRandomProblems(60, 2000, [&](const Problem& p, uint64_t seed) {
    EXPECT_EQ(Difference(RunForward(ctx_, p), RunForward(ctx_, Restrided(p, seed))), "");
  });
}

TEST_P(Contract, BitsDoNotDependOnBatchNeighbours) {
  ForRandomProblems(40, 3000, [&](Problem p, uint64_t) {
    p.options.pattern = {};  // it may differ by batch entry
    p.options.dropout = 0;   // its counter contains the batch index
    const Result all = RunForward(ctx_, p);
    for (int64_t b = 0; b < SizesOf(p).B; ++b) {
      const Result alone = RunForward(ctx_, OneSequence(p, b));
      EXPECT_EQ(Difference(all.o.view().Slice(0, b, b + 1), alone.o.view()), "");
      EXPECT_EQ(Difference(all.lse.view().Slice(0, b, b + 1), alone.lse.view()), "");
    }
  });
}

TEST_P(Contract, BitsDoNotDependOnOtherHeads) {
  ForRandomProblems(40, 4000, [&](Problem p, uint64_t) {
    p.options.pattern = {};  // it may differ by head
    p.options.dropout = 0;
    const Sizes s = SizesOf(p);
    const int64_t group = s.Hq / s.Hkv;
    const Result all = RunForward(ctx_, p);
    for (int64_t h = 0; h < s.Hkv; ++h) {
      const Result alone = RunForward(ctx_, OneKeyHead(p, h));
      EXPECT_EQ(Difference(all.o.view().Slice(2, h * group, (h + 1) * group), alone.o.view()), "");
      EXPECT_EQ(Difference(all.lse.view().Slice(1, h * group, (h + 1) * group), alone.lse.view()), "");
    }
  });
}

TEST_P(Contract, GroupedHeadsEqualRepeatedKeyHeads) {
  for (const int64_t group : {2, 4, 8}) {
    Problem p = MakeProblem(dtype(), {.B = 1, .Tq = 37, .Tk = 150, .Hq = 2 * group, .Hkv = 2, .D = 17, .Dv = 19});
    p.options.causal = true;
    const Result grouped = RunForward(ctx_, p);
    for (ConstTensorView* view : {&p.in.k, &p.in.v}) {
      const Buffer repeated(dtype(), {1, view->size(1), 2 * group, view->size(3)});
      for (int64_t j = 0; j < view->size(1); ++j) {
        for (int64_t h = 0; h < 2 * group; ++h) {
          for (int64_t d = 0; d < view->size(3); ++d) {
            const int64_t at[] = {0, j, h / group, d};
            repeated.Set({0, j, h, d}, GetElement(*view, at));
          }
        }
      }
      *view = Keep(p, repeated);
    }
    EXPECT_EQ(Difference(grouped, RunForward(ctx_, p)), "") << group;
  }
}

TEST_P(Contract, BitsDoNotDependOnPadding) {
  ForRandomProblems(60, 5000, [&](Problem p, uint64_t seed) {
    p.options.pattern = {};  // it counts from key 0
    p.options.dropout = 0;   // positions change
    const Sizes s = SizesOf(p);
    const Result plain = RunForward(ctx_, p);
    for (const int64_t left : {int64_t{0}, static_cast<int64_t>(seed % 97)}) {
      const Result padded = RunForward(ctx_, Padded(p, left, static_cast<int64_t>(seed % 37) + 1));
      EXPECT_EQ(Difference(plain.o.view(), padded.o.view().Slice(1, 0, s.Tq)), "") << left << " keys before";
      EXPECT_EQ(Difference(plain.lse.view(), padded.lse.view().Slice(2, 0, s.Tq)), "") << left << " keys before";
    }
  });
}

TEST_P(Contract, BitsDoNotDependOnPacking) {
  int packed = 0;
  ForRandomProblems(120, 6000, [&](const Problem& p, uint64_t) {
    const std::optional<Problem> in_one = Packed(p);
    if (!in_one) return;
    ++packed;
    const Sizes s = SizesOf(p);
    const Result padded = RunForward(ctx_, p);
    const Result rows = RunForward(ctx_, *in_one);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t i = 0; i < s.Tq; ++i) {
        for (int64_t h = 0; h < s.Hq; ++h) {
          const auto bits = [](double x) { return std::isnan(x) ? kNaN : x; };
          const double a = bits(padded.lse.Get({b, h, i}));
          const double c = bits(rows.lse.Get({h, b * s.Tq + i}));
          ASSERT_TRUE(a == c || (std::isnan(a) && std::isnan(c)));
          for (int64_t d = 0; d < s.Dv; ++d) {
            const double x = bits(padded.o.Get({b, i, h, d}));
            const double y = bits(rows.o.Get({b * s.Tq + i, h, d}));
            ASSERT_TRUE(x == y || (std::isnan(x) && std::isnan(y)));
          }
        }
      }
    }
  });
  EXPECT_GT(packed, 20);
}

TEST_P(Contract, BitsDoNotDependOnHowQueriesAreChunked) {
  ForRandomProblems(60, 7000, [&](const Problem& p, uint64_t seed) {
    if (!p.options.invariant && !Explain(ctx_, p.in, p.options).invariant) {
      return;  // another code path may compute single rows; agreement is tested elsewhere
    }
    for (const char* lists : {"keys(", "row_blocks(", "block_mask("}) {
      // Lists depend on the rows of the whole call.
      if (p.options.pattern.ToString().find(lists) != std::string::npos) return;
    }
    Random random(seed, 3);
    const int64_t Tq = SizesOf(p).Tq;
    const Result whole = RunForward(ctx_, p);
    for (int64_t begin = 0; begin < Tq;) {
      const int64_t length = random.Chance(0.3) ? 1 : random.Integer(1, std::max<int64_t>(Tq / 3, 1));
      const int64_t end = std::min(begin + length, Tq);
      ExpectRows(whole, begin, end, RunForward(ctx_, SomeQueries(p, begin, end)));
      begin = end;
    }
  });
}

TEST_P(Contract, TokenByTokenEqualsTheWhole) {
  Problem p = MakeProblem(dtype(), {.B = 2, .Tq = 90, .Tk = 600, .Hq = 6, .Hkv = 2, .D = 20, .Dv = 12});
  p.options.causal = true;
  p.options.invariant = true;
  const Result whole = RunForward(ctx_, p);
  for (int64_t i = 0; i < 90; ++i) {
    ExpectRows(whole, i, i + 1, RunForward(ctx_, SomeQueries(p, i, i + 1)));
  }
}

// A growing cache: keys are appended, and queries have the last positions.
TEST_P(Contract, KeysThatCameLaterDoNotChangeEarlierRows) {
  Problem p = MakeProblem(dtype(), {.B = 1, .Tq = 140, .Tk = 140, .Hq = 2, .Hkv = 1, .D = 9, .Dv = 33});
  p.options.causal = true;
  p.options.invariant = true;
  const Result whole = RunForward(ctx_, p);
  for (const int64_t length : {1, 2, 63, 64, 65, 128, 139, 140}) {
    Problem prefix = p;
    prefix.in.q = p.in.q.Slice(1, 0, length);
    prefix.in.k = p.in.k.Slice(1, 0, length);
    prefix.in.v = p.in.v.Slice(1, 0, length);
    DescribeOutputs(prefix);
    ExpectRows(whole, 0, length, RunForward(ctx_, prefix));
  }
}

// Overwrites keys and values of key head `head` that are not in `seen`.
void PoisonUnseen(const Problem& p, int64_t b, int64_t head, const std::set<int64_t>& seen, Random& random) {
  for (const ConstTensorView& view : {p.in.k, p.in.v}) {
    const TensorView writable(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides());
    for (int64_t j = 0; j < view.size(1); ++j) {
      if (seen.count(j) != 0) continue;
      for (int64_t d = 0; d < view.size(3); ++d) {
        const int64_t at[] = {b, j, head, d};
        SetElement(writable, at, random.Pick({kNaN, kInfinity, -kInfinity, 3e38, -3e38}));
      }
    }
  }
}

TEST_P(Contract, KeysThatNoRowSeesDoNotMatter) {
  ForRandomProblems(60, 8000, [&](const Problem& random_problem, uint64_t seed) {
    const Problem p = Restrided(random_problem, seed);  // tensors share no memory
    const Sizes s = SizesOf(p);
    const Result before = RunForward(ctx_, p);
    std::vector<std::set<int64_t>> seen(static_cast<size_t>(s.B * s.Hkv));
    ForEachRow(p, [&](int64_t b, int64_t h, int64_t, const std::vector<int64_t>& keys) {
      seen[static_cast<size_t>(b * s.Hkv + h / (s.Hq / s.Hkv))].insert(keys.begin(), keys.end());
    });
    Random random(seed, 4);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.Hkv; ++h) {
        PoisonUnseen(p, b, h, seen[static_cast<size_t>(b * s.Hkv + h)], random);
      }
    }
    EXPECT_EQ(Difference(before, RunForward(ctx_, p)), "");
  });
}

TEST_P(Contract, KeysThatARowDoesNotSeeDoNotMatterToIt) {
  ForRandomProblems(60, 9000, [&](const Problem& random_problem, uint64_t seed) {
    Problem p = Restrided(random_problem, seed);
    p.o.strides.clear();
    p.lse.strides.clear();
    const Sizes s = SizesOf(p);
    const Result before = RunForward(ctx_, p);
    Random random(seed, 5);
    const int64_t row = random.Integer(0, s.Tq - 1);
    const int64_t head = random.Integer(0, s.Hq - 1);
    for (int64_t b = 0; b < s.B; ++b) {
      std::set<int64_t> seen;
      ForEachRow(p, [&](int64_t sequence, int64_t h, int64_t i, const std::vector<int64_t>& keys) {
        if (sequence == b && h == head && i == row) {
          seen.insert(keys.begin(), keys.end());
        }
      });
      PoisonUnseen(p, b, head / (s.Hq / s.Hkv), seen, random);
    }
    const Result after = RunForward(ctx_, p);
    const auto cut = [&](const Result& r) { return r.o.view().Slice(1, row, row + 1).Slice(2, head, head + 1); };
    EXPECT_EQ(Difference(cut(before), cut(after)), "") << "row " << row;
    const auto cut_lse = [&](const Result& r) { return r.lse.view().Slice(2, row, row + 1).Slice(1, head, head + 1); };
    EXPECT_EQ(Difference(cut_lse(before), cut_lse(after)), "");
  });
}

TEST_P(Contract, EmptyRowsAreExactlyZeroAndMinusInfinity) {
  Problem p = MakeProblem(dtype(), {.B = 2, .Tq = 70, .Tk = 20, .Hq = 2, .Hkv = 1, .D = 5, .Dv = 7});
  p.memory[2].FillConstant(-1);  // a zero weight would give -0
  p.options.causal = true;       // the first 50 rows see nothing
  p.options.query_lengths = KeepInts(p, {70, 65});
  p.options.sinks = KeepFloats(p, {0.5, kNaN});
  const Result r = RunForward(ctx_, p);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 70; ++i) {
      if (i >= 50 && (b == 0 || i < 65)) continue;
      for (int64_t h = 0; h < 2; ++h) {
        EXPECT_EQ(r.lse.Get({b, h, i}), -kInfinity);
        for (int64_t d = 0; d < 7; ++d) {
          const double o = r.o.Get({b, i, h, d});
          EXPECT_TRUE(o == 0 && !std::signbit(o)) << o;
        }
      }
    }
  }
}

TEST_P(Contract, FullyMaskedRowsAreExactlyZeroAndMinusInfinity) {
  for (const int way : {0, 1, 2, 3, 4}) {
    Problem p = MakeProblem(dtype(), {.B = 1, .Tq = 5, .Tk = 130, .Hq = 1, .Hkv = 1, .D = 3, .Dv = 3});
    p.memory[2].FillConstant(-1);
    if (way == 0) {
      p.options.mask = Keep(p, Buffer(DType::kBool, {1, 1}).FillConstant(0));
    } else if (way == 1) {
      p.options.bias = Keep(p, Buffer(dtype(), {1, 130}).FillConstant(-kInfinity));
    } else if (way == 2) {
      p.options.key_lengths = KeepInts(p, {0});
    } else if (way == 3) {
      p.options.segments_q = Keep(p, Buffer(DType::kI32, {1, 5}).FillConstant(1));
      p.options.segments_k = Keep(p, Buffer(DType::kI32, {1, 130}).FillConstant(2));
    } else {
      p.options.window = {0, 0};
      p.options.query_starts = KeepInts(p, {int64_t{1} << 40});
    }
    const Result r = RunForward(ctx_, p);
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(r.lse.Get({0, 0, i}), -kInfinity) << way;
      const double o = r.o.Get({0, i, 0, 1});
      EXPECT_TRUE(o == 0 && !std::signbit(o)) << way << ": " << o;
    }
  }
}

TEST_P(Contract, ARowOfFiniteMinimumAttendsUniformly) {
  // The lowest number of f16 is -65504, beside which logits can still be distinguished.
  if (dtype() == DType::kF16) return;
  // The prefix spans tiles of 64 keys and segments of 512, so that rescaling and merging are tested too.
  constexpr int64_t kTk = 700;
  for (const bool times_alibi : {false, true}) {
    Problem p = MakeProblem(dtype(), {.B = 1, .Tq = 2, .Tk = kTk, .Hq = 1, .Hkv = 1, .D = 8, .Dv = 2});
    double lowest = std::numeric_limits<float>::lowest();
    if (dtype() == DType::kF64) lowest = std::numeric_limits<double>::lowest();
    if (dtype() == DType::kBF16) lowest = -0x1.FEp127;
    const Buffer bias(dtype(), {2, kTk});
    bias.FillConstant(0);
    for (int64_t j = 0; j < kTk; ++j) bias.Set({0, j}, lowest);
    p.options.bias = Keep(p, bias);
    if (times_alibi) p.options.alibi = KeepFloats(p, {0.5});
    double mean = 0;
    for (int64_t j = 0; j < kTk; ++j) mean += p.memory[2].Get({0, j, 0, 0}) / kTk;
    const Result r = RunForward(ctx_, p);
    const double rounding = dtype() == DType::kBF16 ? 0x1p-7 : 0;
    EXPECT_NEAR(r.o.Get({0, 0, 0, 0}), mean, (dtype() == DType::kF64 ? 1e-13 : 1e-5) + rounding);
    EXPECT_NEAR(r.lse.Get({0, 0, 0}) / lowest, 1, 1e-6);
    EXPECT_FALSE(std::isnan(r.o.Get({0, 1, 0, 0})));
  }
}

TEST_P(Contract, EmptySizesAreLegal) {
  for (const Sizes& s :
       {Sizes{.B = 0, .Tq = 3, .Tk = 4, .Hq = 2, .Hkv = 1}, Sizes{.B = 2, .Tq = 0, .Tk = 4, .Hq = 2, .Hkv = 1},
        Sizes{.B = 2, .Tq = 3, .Tk = 0, .Hq = 2, .Hkv = 1}}) {
    const Problem p = MakeProblem(dtype(), s);
    const Result r = RunForward(ctx_, p);
    if (s.Tk == 0) {
      EXPECT_EQ(r.o.Get({1, 2, 1, 0}), 0);
      EXPECT_EQ(r.lse.Get({1, 1, 2}), -kInfinity);
    }
    const Explanation e = Explain(ctx_, p.in, p.options);
    EXPECT_EQ(e.visited_pairs, 0);
    EXPECT_EQ(e.flops, 0);
  }
}

TEST_P(Contract, StridedOutputsLeaveTheirGapsAlone) {
  const Problem p = MakeProblem(dtype(), {.B = 2, .Tq = 35, .Tk = 9, .Hq = 3, .Hkv = 3, .D = 4, .Dv = 5});
  const int64_t o_strides[] = {35 * 3 * 9, 9, 35 * 9, 1};
  const int64_t lse_strides[] = {1000, 2, 7};
  const Buffer o(dtype(), p.o.sizes, o_strides, Placement::kBeforeGuard, 3);
  const Buffer lse(p.lse.dtype, p.lse.sizes, lse_strides, Placement::kAfterGuard);
  Forward(ctx_, p.in, p.options, {o.view(), lse.view()});
  const Result plain = RunForward(ctx_, p);
  EXPECT_EQ(Difference({o, lse}, plain), "");
  for (int64_t i = 0; i < 34; ++i) {  // 4 of 9 elements belong to no tensor
    for (int64_t d = 5; d < 9; ++d) {
      const int64_t at = i * 9 + d;
      EXPECT_TRUE(std::isnan(LoadAsDouble(dtype(), o.view().data(), at)));
    }
  }
}

TEST_P(Contract, LseIsOptionalAndChangesNoBits) {
  const Problem p = MakeProblem(dtype(), {.B = 1, .Tq = 21, .Tk = 80, .Hq = 2, .Hkv = 1, .D = 12, .Dv = 12});
  Problem without = p;
  without.lse = {};
  EXPECT_EQ(Difference(RunForward(ctx_, p).o.view(), RunForward(ctx_, without).o.view()), "");
}

TEST_P(Contract, DropoutIsTheSameInEveryChunkAndKeepsItsRate) {
  constexpr int64_t kT = 400;
  Problem p = MakeProblem(dtype(), {.B = 1, .Tq = kT, .Tk = kT, .Hq = 2, .Hkv = 2, .D = 1, .Dv = kT});
  p.memory[0].FillConstant(0);
  p.memory[2].FillConstant(0);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t j = 0; j < kT; ++j) p.memory[2].Set({0, j, h, j}, 1);
  }
  p.options.seed = 5;
  p.options.invariant = true;
  for (const double dropout : {0.1, 0.5, 0.9}) {
    p.options.dropout = dropout;
    const Result whole = RunForward(ctx_, p);
    ExpectRows(whole, 100, 117, RunForward(ctx_, SomeQueries(p, 100, 117)));
    double kept = 0;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < kT; ++i) {
        for (int64_t j = 0; j < kT; ++j) kept += whole.o.Get({0, i, h, j}) > 0;
      }
    }
    const double n = 2.0 * kT * kT;
    EXPECT_NEAR(kept, n * (1 - dropout), 5 * std::sqrt(n * dropout * (1 - dropout)));
  }
  p.options.dropout = 0.5;
  const Result first = RunForward(ctx_, p);
  p.options.seed = 6;
  EXPECT_NE(Difference(first, RunForward(ctx_, p)), "");
  p.options.seed = 5;
  p.options.dropout_offset = 1;
  EXPECT_NE(Difference(first, RunForward(ctx_, p)), "");
}

}  // namespace
}  // namespace heed::attention
