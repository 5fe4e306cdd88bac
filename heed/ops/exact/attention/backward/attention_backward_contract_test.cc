// The contract of the backward pass beyond agreement with its reference: bitwise reproducibility, propagation of NaN,
// rows without a key.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/unfair_executor.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Param = std::tuple<DType, std::string>;

template <class F>
void ForEachIndex(const ConstTensorView& view, const F& f) {
  if (view.num_elements() == 0) return;
  std::vector<int64_t> index(view.sizes().size());
  do {
    f(index);
  } while (NextIndex(view.sizes(), index));
}

// A copy in its own memory, which a test may overwrite.
Buffer Own(Problem& p, ConstTensorView& view) {
  const Buffer copy(view.dtype(), view.sizes());
  ForEachIndex(view, [&](const std::vector<int64_t>& at) { SetElement(copy.view(), at, GetElement(view, at)); });
  view = Keep(p, copy);
  return copy;
}

class Backwards : public testing::TestWithParam<Param> {
 protected:
  Backwards() { ctx_.set_isa(isa()); }
  DType dtype() const { return std::get<0>(GetParam()); }
  std::string isa() const { return std::get<1>(GetParam()); }

  // Calls f with random problems that are not packed and have rows, with all gradients, with and without a d_lse.
  template <class F>
  void ForRandomProblems(int count, uint64_t first_seed, const F& f) {
    for (uint64_t seed = first_seed; count > 0; ++seed) {
      Problem p = RandomProblem(dtype(), seed);
      if (p.options.cu_seqlens_q || p.in.q.num_elements() == 0) continue;
      p.o.strides.clear();
      DescribeOutputs(p);
      p = WithGradients(p, seed);
      if (seed % 3 == 0) p.d_lse = {};
      SCOPED_TRACE(Title(p));
      f(p, seed);
      if (HasFailure()) return;
      --count;
    }
  }

  // A problem of several blocks of rows and groups of keys, with accumulators that tasks share.
  Problem Long() const {
    Problem p = MakeProblem(dtype(), {.B = 2, .Tq = 150, .Tk = 800, .Hq = 4, .Hkv = 2, .D = 24, .Dv = 40});
    p.options.causal = true;
    p.options.alibi = KeepFloats(p, {0.5, 0.1, 0.01, -0.2});
    p.options.sinks = KeepFloats(p, {0.5, 1, -2, 3});
    return p;
  }

  Context ctx_{1};
};

std::vector<Param> Combinations() {
  std::vector<Param> all;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::string& target : AvailableTargets(dtype)) all.emplace_back(dtype, target);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(EveryTarget, Backwards, testing::ValuesIn(Combinations()), [](const auto& value) {
  return std::string(Name(std::get<0>(value.param))) + "_" + std::get<1>(value.param);
});

TEST_P(Backwards, BitsDoNotDependOnThreads) {
  ForRandomProblems(30, 1000, [&](const Problem& p, uint64_t seed) {
    const auto one = RunBackward(ctx_, p);
    for (const int threads : {2, 3}) {
      UnfairExecutor unfair(threads, seed);
      Context ctx(unfair.executor());
      ctx.set_isa(isa());
      EXPECT_EQ(Difference(one, RunBackward(ctx, p)), "") << threads;
    }
  });
}

// Two tasks add to the same dq, dalibi and dbias; the bias broadcasts in every way, each with its own schedule.
TEST_P(Backwards, BitsDoNotDependOnThreadsInALongProblem) {
  const std::vector<std::vector<int64_t>> biases = {
      {}, {2, 4, 150, 800}, {150, 800}, {1, 4, 1, 800}, {2, 1, 150, 1}, {1, 1, 1, 1}};
  uint64_t schedule = 0;
  for (const std::vector<int64_t>& sizes : biases) {
    SCOPED_TRACE(ShapeString(sizes));
    Problem p = Long();
    if (!sizes.empty()) p.options.bias = Keep(p, Buffer(dtype(), sizes).FillNormal(3));
    if (sizes.size() == 2) p.options.key_starts = KeepInts(p, {0, 100});
    p = WithGradients(p, 4);
    const auto one = RunBackward(ctx_, p);
    for (const int threads : {2, 3}) {
      UnfairExecutor unfair(threads, schedule++);
      Context ctx(unfair.executor());
      ctx.set_isa(isa());
      EXPECT_EQ(Difference(one, RunBackward(ctx, p)), "") << threads;
    }
    Context pool(3);
    pool.set_isa(isa());
    EXPECT_EQ(Difference(one, RunBackward(pool, p)), "") << "own pool";
  }
}

TEST_P(Backwards, BitsDoNotDependOnAnUsedContext) {
  Problem poison = MakeProblem(dtype(), {.B = 1, .Tq = 70, .Tk = 300, .Hq = 2, .Hkv = 1, .D = 130, .Dv = 130});
  poison.options.softcap = 3;
  for (size_t i = 0; i < 3; ++i) poison.memory[i].FillConstant(kNaN);
  poison = WithGradients(poison, 1);
  ForRandomProblems(20, 1500, [&](const Problem& p, uint64_t) {
    Context fresh(1);
    fresh.set_isa(isa());
    const auto expected = RunBackward(fresh, p);
    RunBackward(ctx_, poison);
    EXPECT_EQ(Difference(expected, RunBackward(ctx_, p)), "");
  });
}

TEST_P(Backwards, BitsDoNotDependOnStrides) {
  ForRandomProblems(40, 2000, [&](const Problem& p, uint64_t seed) {
    EXPECT_EQ(Difference(RunBackward(ctx_, p), RunBackward(ctx_, Restrided(p, seed))), "");
  });
}

TEST_P(Backwards, BitsDoNotDependOnWhichGradientsAreAskedFor) {
  ForRandomProblems(30, 2500, [&](const Problem& all, uint64_t seed) {
    const auto expected = RunBackward(ctx_, all);
    const size_t n = all.gradients.size();
    Random random(seed, 6);
    for (int round = 0; round < 8; ++round) {  // the first four of a single gradient
      const uint32_t subset = round < 4 ? uint32_t{1} << random.Integer(0, static_cast<int64_t>(n) - 1) : random.Word();
      Problem some = all;
      some.gradients.clear();
      std::vector<Buffer> same;
      for (size_t i = 0; i < n; ++i) {
        if ((subset >> i & 1) == 0) continue;
        some.gradients.push_back(all.gradients[i]);
        same.push_back(expected[i]);
      }
      EXPECT_EQ(Difference(same, RunBackward(ctx_, some)), "") << subset;
    }
  });
}

// The first three gradients: dq, dk and dv.
constexpr size_t kOwn = 3;

TEST_P(Backwards, BitsDoNotDependOnBatchNeighbours) {
  ForRandomProblems(40, 3000, [&](Problem p, uint64_t) {
    p.options.pattern = {};  // may have an axis of batch entries
    p.options.dropout = 0;   // its counter depends on the batch index
    const auto all = RunBackward(ctx_, p);
    for (int64_t b = 0; b < SizesOf(p).B; ++b) {
      const auto alone = RunBackward(ctx_, OneSequence(p, b));
      for (size_t g = 0; g < kOwn; ++g) {
        EXPECT_EQ(Difference(all[g].view().Slice(0, b, b + 1), alone[g].view()), "") << g;
      }
    }
  });
}

TEST_P(Backwards, BitsDoNotDependOnOtherHeads) {
  ForRandomProblems(40, 4000, [&](Problem p, uint64_t) {
    p.options.pattern = {};  // may have an axis of heads
    p.options.dropout = 0;
    const Sizes s = SizesOf(p);
    const auto all = RunBackward(ctx_, p);
    for (int64_t h = 0; h < s.Hkv; ++h) {
      const auto alone = RunBackward(ctx_, OneKeyHead(p, h));
      for (size_t g = 0; g < kOwn; ++g) {
        const int64_t group = g == 0 ? s.Hq / s.Hkv : 1;
        EXPECT_EQ(Difference(all[g].view().Slice(2, h * group, (h + 1) * group), alone[g].view()), "") << g;
      }
    }
  });
}

TEST_P(Backwards, BitsDoNotDependOnPaddingWhichHasZeros) {
  ForRandomProblems(40, 5000, [&](Problem p, uint64_t seed) {
    p.options.pattern = {};  // counts from key 0
    p.options.dropout = 0;   // positions change
    const Sizes s = SizesOf(p);
    const auto plain = RunBackward(ctx_, p);
    for (const int64_t left : {int64_t{0}, static_cast<int64_t>(seed % 97)}) {
      const int64_t right = static_cast<int64_t>(seed % 37) + 1;
      const auto padded = RunBackward(ctx_, Padded(p, left, right));
      for (size_t g = 0; g < kOwn; ++g) {
        SCOPED_TRACE(p.gradients[g].name + ", keys before: " + std::to_string(left));
        const int64_t begin = g == 0 ? 0 : left, T = g == 0 ? s.Tq : s.Tk;
        const TensorView& view = padded[g].view();
        EXPECT_EQ(Difference(plain[g].view(), view.Slice(1, begin, begin + T)), "");
        for (const auto& [from, to] : {std::pair{int64_t{0}, begin}, {begin + T, view.size(1)}}) {
          ForEachIndex(view.Slice(1, from, to), [&, from = from, to = to](const auto& at) {
            const double x = GetElement(view.Slice(1, from, to), at);
            EXPECT_TRUE(x == 0 && !std::signbit(x)) << x;
          });
        }
      }
    }
  });
}

TEST_P(Backwards, BitsDoNotDependOnPacking) {
  int packed = 0;
  ForRandomProblems(90, 6000, [&](Problem p, uint64_t) {
    const std::optional<Problem> in_one = Packed(p);
    if (!in_one) return;
    ++packed;
    const auto padded = RunBackward(ctx_, p), rows = RunBackward(ctx_, *in_one);
    for (size_t g = 0; g < kOwn; ++g) {
      const int64_t T = padded[g].view().size(1);
      for (int64_t b = 0; b < SizesOf(p).B; ++b) {
        const TensorView part = padded[g].view().Slice(0, b, b + 1);
        const TensorView same(part.data(), part.dtype(), part.sizes().subspan(1), part.strides().subspan(1));
        EXPECT_EQ(Difference(same, rows[g].view().Slice(0, b * T, (b + 1) * T)), "") << g;
      }
    }
  });
  EXPECT_GT(packed, 15);
}

TEST_P(Backwards, RowsAndKeysBeyondThePackedSequencesHaveZeros) {
  Problem p = MakeProblem(dtype(), {1, 9, 12, 2, 1, 5, 3});
  p.options.cu_seqlens_q = KeepInts(p, {0, 3, 3, 7});
  p.options.cu_seqlens_k = KeepInts(p, {0, 4, 6, 10});
  DescribeOutputs(p);
  p = WithGradients(p, 3);
  const Buffer d_o = Own(p, p.d_o);
  for (int64_t d = 0; d < 3; ++d) d_o.Set({0, 8, 1, d}, kNaN);
  const auto gradients = RunBackward(ctx_, p);
  for (size_t g = 0; g < kOwn; ++g) {
    ForEachIndex(gradients[g].view(), [&](const std::vector<int64_t>& at) {
      const double x = GetElement(gradients[g].view(), at);
      EXPECT_TRUE(std::isfinite(x)) << ShapeString(at);
      const bool beyond = at[1] >= (g == 0 ? 7 : 10);
      const bool seen = !beyond && (g == 0 || at[1] < 4 || at[1] >= 6);  // two keys that no query sees
      EXPECT_EQ(x == 0 && !std::signbit(x), !seen) << ShapeString(at);
    });
  }
}

// The pairs that see each other in a problem that is not packed.
struct Sight {
  Sizes s;
  std::vector<std::set<int64_t>> keys;  // keys of each row
  std::vector<int64_t> stands_at;       // the last valid key at or before the row
  std::vector<int64_t> positions;       // of rows that see a key

  explicit Sight(const Problem& p)
      : s(SizesOf(p)), keys(static_cast<size_t>(s.B * s.Hq * s.Tq)), stands_at(keys.size()), positions(keys.size()) {
    const Buffer o(DType::kF64, p.o.sizes);
    ReferenceRows(p.in, p.options, {o.view(), {}}, [&](const ReferenceRow& row) {
      const size_t at = Row(row.sequence, row.head, row.query);
      stands_at[at] = row.stands_at;
      if (!row.pairs.empty()) positions[at] = row.pairs[0].key + row.pairs[0].keys_before;
    });
    ForEachRow(p, [&](int64_t b, int64_t h, int64_t i, const std::vector<int64_t>& of_row) {
      keys[Row(b, h, i)].insert(of_row.begin(), of_row.end());
    });
  }
  size_t Row(int64_t b, int64_t h, int64_t i) const { return static_cast<size_t>((b * s.Hq + h) * s.Tq + i); }
};

struct Spoilt {
  enum Where { kQuery, kGradient, kKey, kValue } where;
  int64_t b, head, token;
};

// The elements that may change if a row of q or d_o, or of k or v, becomes NaN: gradients of the rows that are or see
// it, and of the keys that these rows see.
class Reach {
 public:
  Reach(const Problem& p, const Sight& sight, const Spoilt& spoilt) : p_(p), sight_(sight) {
    const Sizes& s = sight.s;
    const int64_t group = s.Hq / s.Hkv;
    rows_.resize(sight.keys.size());
    keys_.resize(static_cast<size_t>(s.B * s.Hkv * s.Tk));
    const bool by_row = spoilt.where == Spoilt::kQuery || spoilt.where == Spoilt::kGradient;
    for (int64_t h = 0; h < s.Hq; ++h) {
      for (int64_t i = 0; i < s.Tq; ++i) {
        const size_t row = sight.Row(spoilt.b, h, i);
        rows_[row] = by_row ? h == spoilt.head && i == spoilt.token
                            : h / group == spoilt.head && sight.keys[row].count(spoilt.token) != 0;
        if (!rows_[row]) continue;
        for (const int64_t j : sight.keys[row]) keys_[Key(spoilt.b, h / group, j)] = true;
      }
    }
  }

  bool Reaches(const std::string& gradient, const std::vector<int64_t>& at) const {
    const Sizes& s = sight_.s;
    if (gradient == "dq") return rows_[sight_.Row(at[0], at[2], at[1])];
    if (gradient == "dk" || gradient == "dv") return keys_[Key(at[0], at[2], at[1])];
    // Other gradients are reached if a reached row adds to the element.
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.Hq; ++h) {
        for (int64_t i = 0; i < s.Tq; ++i) {
          const size_t row = sight_.Row(b, h, i);
          if (!rows_[row]) continue;
          if (gradient == "dsinks"           ? at[0] == h
              : gradient == "dalibi"         ? at.back() == h && (at.size() == 1 || at[0] == b)
              : gradient == "drelative_bias" ? at[0] == h && sight_.keys[row].contains(sight_.positions[row] - at[1])
              : gradient == "dlog_decay"     ? at[0] == b && at[2] == h && at[1] <= sight_.stands_at[row] &&
                                               sight_.keys[row].lower_bound(at[1]) != sight_.keys[row].begin()
                                         : Adds(at, {b, h, i}, sight_.keys[row])) {
            return true;
          }
        }
      }
    }
    return false;
  }

 private:
  size_t Key(int64_t b, int64_t key_head, int64_t j) const {
    return static_cast<size_t>((b * sight_.s.Hkv + key_head) * sight_.s.Tk + j);
  }
  bool Adds(const std::vector<int64_t>& at, const std::array<int64_t, 3>& row, const std::set<int64_t>& keys) const {
    const ConstTensorView& bias = p_.options.bias;
    const size_t rank = at.size();
    for (size_t axis = 0; axis < rank; ++axis) {
      const size_t of_four = 4 - rank + axis;
      if (bias.size(static_cast<int>(axis)) == 1) continue;
      if (of_four < 3 ? at[axis] != row[of_four] : keys.count(at[axis]) == 0) return false;
    }
    return !keys.empty();
  }

  const Problem& p_;
  const Sight& sight_;
  std::vector<bool> rows_, keys_;
};

TEST_P(Backwards, ANanReachesThoseWhoSeeItAlone) {
  int reached = 0, spared = 0;
  ForRandomProblems(80, 7000, [&](Problem p, uint64_t seed) {
    Random random(seed, 7);
    Buffer tensors[] = {Own(p, p.in.q), Own(p, p.d_o), Own(p, p.in.k), Own(p, p.in.v)};
    const Sight sight(p);
    if (sight.s.Tk == 0 || sight.s.B * sight.s.Hq * sight.s.Tq > 1500) return;
    const auto before = RunBackward(ctx_, p);
    for (const Spoilt::Where where : {Spoilt::kQuery, Spoilt::kGradient, Spoilt::kKey, Spoilt::kValue}) {
      const TensorView& t = tensors[where].view();
      const Spoilt spoilt = {where, random.Integer(0, t.size(0) - 1), random.Integer(0, t.size(2) - 1),
                             random.Integer(0, t.size(1) - 1)};
      const double value = random.Pick({kNaN, kNaN, kInfinity, -kInfinity});
      SCOPED_TRACE(std::to_string(value) + " in tensor " + std::to_string(where) + " at " +
                   ShapeString(std::vector{spoilt.b, spoilt.token, spoilt.head}));
      const int64_t at[] = {spoilt.b, spoilt.token, spoilt.head, random.Integer(0, t.size(3) - 1)};
      const double finite = GetElement(t, at);
      SetElement(t, at, value);
      const auto after = RunBackward(ctx_, p);
      SetElement(t, at, finite);

      const Reach reach(p, sight, spoilt);
      for (size_t g = 0; g < p.gradients.size(); ++g) {
        const std::string& name = p.gradients[g].name;
        int64_t differ = 0;
        ForEachIndex(before[g].view(), [&](const std::vector<int64_t>& index) {
          const double x = GetElement(before[g].view(), index);
          const double y = GetElement(after[g].view(), index);
          const bool same = x == y ? std::signbit(x) == std::signbit(y) : std::isnan(x) && std::isnan(y);
          if (name == "dbias" && same) return;  // Reaches() is slow
          if (reach.Reaches(name, index)) {
            ++reached;
          } else {
            ++spared;
            if (!same && differ++ == 0) {
              ADD_FAILURE() << name << ShapeString(index) << " was " << x << ", is " << y;
            }
          }
        });
      }
      if (HasFailure()) return;
    }
  });
  EXPECT_GT(reached, 1000);
  EXPECT_GT(spared, 1000);
}

// The reference defines which elements a NaN makes NaN; a kernel must not lose it.
TEST_P(Backwards, ANanArrivesWhereTheReferenceSays) {
  for (const bool masked : {false, true}) {
    for (int where = 0; where < 4; ++where) {
      Problem p = MakeProblem(dtype(), {2, 70, 300, 2, 1, 5, 3});
      if (masked) p.options.window = {40, 5};
      p = WithGradients(p, 9);
      const Buffer tensors[] = {Own(p, p.in.q), Own(p, p.d_o), Own(p, p.in.k), Own(p, p.in.v)};
      tensors[where].Set({1, 33, 0, 2}, kNaN);
      const Comparison c = Compare(MakeBackwardCase(p, true), ctx_);
      EXPECT_TRUE(c.ok) << where << ": " << c.message;
    }
  }
}

TEST_P(Backwards, RowsWithoutAKeyHaveZerosAndChangeNothing) {
  int empty = 0;
  ForRandomProblems(60, 8000, [&](Problem p, uint64_t) {
    const Buffer d_o = Own(p, p.d_o);
    Buffer d_lse;
    if (p.d_lse) d_lse = Own(p, p.d_lse);
    const Sight sight(p);
    const auto before = RunBackward(ctx_, p);
    const Sizes& s = sight.s;
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.Hq; ++h) {
        for (int64_t i = 0; i < s.Tq; ++i) {
          if (!sight.keys[sight.Row(b, h, i)].empty()) continue;
          ++empty;
          for (int64_t d = 0; d < s.Dv; ++d) d_o.Set({b, i, h, d}, kNaN);
          if (p.d_lse) d_lse.Set({b, h, i}, kInfinity);
          for (int64_t d = 0; d < s.D; ++d) {
            const double x = before[0].Get({b, i, h, d});
            EXPECT_TRUE(x == 0 && !std::signbit(x)) << x;
          }
        }
      }
    }
    EXPECT_EQ(Difference(before, RunBackward(ctx_, p)), "");
  });
  EXPECT_GT(empty, 500);
}

TEST_P(Backwards, NothingToSumIsZero) {
  struct Empty {
    int64_t B, Tq, Tk;
  };
  for (const auto& [B, Tq, Tk] : {Empty{0, 4, 5}, {2, 0, 5}, {2, 4, 0}, {2, 0, 0}}) {
    for (const bool one_bias : {false, true}) {
      Problem p = MakeProblem(dtype(), {B, Tq, Tk, 4, 2, 3, 6});
      p.options.sinks = KeepFloats(p, {1, 2, 3, 4});
      p.options.alibi = KeepFloats(p, {1, 2, 3, 4});
      const std::vector<int64_t> bias = one_bias ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{4, Tq, Tk};
      p.options.bias = Keep(p, Buffer(dtype(), bias).FillNormal(1));
      p = WithGradients(p, 2);
      for (const Buffer& gradient : RunBackward(ctx_, p)) {
        ForEachIndex(gradient.view(), [&](const std::vector<int64_t>& at) {
          const double x = GetElement(gradient.view(), at);
          EXPECT_TRUE(x == 0 && !std::signbit(x)) << B << Tq << Tk << ": " << x;
        });
      }
    }
  }
}

}  // namespace
}  // namespace heed::attention
