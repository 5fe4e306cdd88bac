// Tests of all options together: random calls cover each of them, `invariant` holds with each, and slow or ineffective
// options are reported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};

// Calls f(problem) for random problems until three of them have had each of these rows, or for `most` seeds.
template <class F>
void UntilAllAreGiven(DType dtype, std::vector<const OptionRow*> rows, uint64_t most, const F& f) {
  std::vector<int> left(rows.size(), 3);
  for (uint64_t seed = 0; seed < most && std::ranges::any_of(left, [](int n) { return n > 0; }); ++seed) {
    const Problem p = RandomProblem(dtype, seed);
    bool is_new = false;
    for (size_t i = 0; i < rows.size(); ++i) is_new = is_new || (left[i] > 0 && IsGiven(*rows[i], p.options));
    if (!is_new || !f(p)) continue;
    for (size_t i = 0; i < rows.size(); ++i) left[i] -= IsGiven(*rows[i], p.options);
  }
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_LE(left[i], 0) << rows[i]->name;
}

// The rows that a test distinguishes: a seed has no effect alone, and precision has tests of its own.
std::vector<const OptionRow*> Rows(const auto& wanted) {
  std::vector<const OptionRow*> rows;
  for (const OptionRow& row : kOptionRows) {
    const bool of_draws = std::holds_alternative<uint64_t Options::*>(row.field) ||
                          std::holds_alternative<uint32_t Options::*>(row.field);
    if (!of_draws && row.field != OptionField(&Options::precision) && wanted(row)) rows.push_back(&row);
  }
  return rows;
}

TEST(AttentionOptionsTest, EveryOptionIsInSomeRandomProblemAndInItsTitle) {
  const std::vector<const OptionRow*> rows = Rows([](const OptionRow&) { return true; });
  UntilAllAreGiven(DType::kF32, rows, 500, [&](const Problem& p) {
    for (const OptionRow* row : rows) {
      EXPECT_EQ(IsGiven(*row, p.options), Title(p).find(std::string(" ") + row->name) != std::string::npos)
          << row->name << " in " << Title(p);
    }
    return true;
  });
}

void ExpectRows(const Result& whole, int64_t begin, int64_t end, const Result& part) {
  EXPECT_EQ(Difference(whole.o.view().Slice(1, begin, end), part.o.view()), "");
  EXPECT_EQ(Difference(whole.lse.view().Slice(2, begin, end), part.lse.view()), "");
}

// The problem with row-major outputs, for splitting: its pattern is by positions, not by the rows of one call.
Problem Whole(const Problem& problem) {
  Problem p = problem;
  p.options.invariant = true;
  if (p.options.pattern.present()) p.options.pattern = patterns::SlidingWindow(5, 0) | patterns::Atrous(3);
  DescribeOutputs(p);
  return p;
}

TEST(AttentionOptionsTest, WholeChunkedAndTokenByTokenHaveTheSameBitsWithEveryOption) {
  for (const DType dtype : kDTypes) {
    for (const std::string& target : AvailableTargets(dtype)) {
      Context ctx(1);
      ctx.set_isa(target);
      const auto splits = [](const OptionRow& row) { return row.axes != "N"; };  // packed calls are split differently
      UntilAllAreGiven(dtype, Rows(splits), 600, [&](const Problem& problem) {
        if (problem.options.cu_seqlens_q || problem.in.q.num_elements() == 0 || problem.in.q.size(1) > 40) return false;
        const Problem p = Whole(problem);
        SCOPED_TRACE(target + " " + Title(p));
        EXPECT_TRUE(Explain(ctx, p.in, p.options).invariant);
        const Result whole = RunForward(ctx, p);
        const int64_t Tq = p.in.q.size(1);
        for (const int64_t step : {int64_t{1}, int64_t{7}}) {
          for (int64_t i = 0; i < Tq; i += step) {
            const int64_t end = std::min(i + step, Tq);
            ExpectRows(whole, i, end, RunForward(ctx, SomeQueries(p, i, end)));
          }
        }
        return !testing::Test::HasFailure();
      });
    }
  }
}

// The part of a problem that a cache takes, in which later keys change no earlier row.
Problem OnCache(const Problem& problem) {
  Problem p = Whole(problem);
  Options& o = p.options;
  const Options given = o;
  o = {};
  for (const OptionRow& row : kOptionRows) {
    if (row.not_on_cache != nullptr) continue;
    std::visit([&](auto field) { o.*field = given.*field; }, row.field);
  }
  o.causal = true;
  o.prefix = {};
  return p;
}

TEST(AttentionOptionsTest, ACacheThatGrowsHasTheBitsOfOneCallWithEveryOption) {
  for (const DType dtype : kDTypes) {
    Context ctx(2);
    const auto on_cache = [](const OptionRow& row) {
      return row.not_on_cache == nullptr && row.field != OptionField(&Options::prefix);
    };
    UntilAllAreGiven(dtype, Rows(on_cache), 3000, [&](const Problem& problem) {
      const ConstTensorView& k = problem.in.k;
      const int64_t Tk = problem.options.cu_seqlens_q ? 0 : k.size(1), Tq = Tk == 0 ? 0 : problem.in.q.size(1);
      if (Tq == 0 || Tq > Tk || Tq > 40 || k.num_elements() == 0) return false;
      const Problem p = OnCache(problem);
      SCOPED_TRACE(Title(p));
      const Result whole = RunForward(ctx, p);
      KVCache cache({.batch = k.size(0),
                     .heads = k.size(2),
                     .dim = k.size(3),
                     .value_dim = p.in.v.size(3),
                     .page = 16,
                     .dtype = dtype});
      cache.Append(k.Slice(1, 0, Tk - Tq), p.in.v.Slice(1, 0, Tk - Tq));
      for (int64_t i = 0, end; i < Tq; i = end) {
        end = std::min(Tq, i + (i % 3 == 0 ? 1 : 5));
        const int64_t length = Tk - Tq + end;
        cache.Append(k.Slice(1, length - (end - i), length), p.in.v.Slice(1, length - (end - i), length));
        Problem step = SomeQueries(p, i, end);
        SliceOptions(step.options, 'K', 0, length);
        if (step.options.key_starts) {  // refers to the keys appended so far
          std::vector<int64_t> starts;
          for (int64_t b = 0; b < k.size(0); ++b) {
            const ConstTensorView& t = step.options.key_starts;
            starts.push_back(std::min(length, LoadAsInt64(t.dtype(), t.data(), b * t.stride(0))));
          }
          step.options.key_starts = KeepInts(step, starts);
        }
        step.options.query_starts = {};
        step.options.align = Align::kBottomRight;
        const Result part = {Buffer(dtype, step.o.sizes), Buffer(step.lse.dtype, step.lse.sizes)};
        Attend(ctx, cache.view(), step.in.q, step.options, {part.o.view(), part.lse.view()});
        ExpectRows(whole, i, end, part);
      }
      return !testing::Test::HasFailure();
    });
  }
}

// --- strict, and precision ---

// A problem with a mask and a bias; `transpose` makes the keys of one of them strided.
Problem WithPairs(DType dtype, std::string_view transpose, DType bias_dtype) {
  Problem p = MakeProblem(dtype, {1, 5, 7, 1, 1, 4, 4});
  const auto pairs = [&](std::string_view name, DType of) {
    const int64_t plain[] = {35, 35, 7, 1}, apart[] = {35, 35, 1, 5};
    const int64_t sizes[] = {1, 1, 5, 7};
    const Buffer buffer(of, sizes, name == transpose ? apart : plain, Placement::kAfterGuard);
    return Keep(p, buffer.FillConstant(1));
  };
  p.options.mask = pairs("mask", DType::kBool);
  p.options.bias = pairs("bias", bias_dtype);
  return WithGradients(p, 1);
}

TEST(AttentionOptionsTest, AStrictContextRefusesPairsThatAreReadOneByOneInTheWordsOfExplain) {
  const struct {
    DType dtype;
    const char* transposed;
    DType bias;
    const char* why;
  } slow[] = {{DType::kF32, "mask", DType::kF32, "mask: its keys are not contiguous"},
              {DType::kF64, "bias", DType::kF64, "bias: its keys are not contiguous"},
              {DType::kF64, "", DType::kF32, "bias: it is f32 beside f64"},
              {DType::kBF16, "", DType::kF64, "bias: it is f64 beside bf16"}};
  for (const auto& [dtype, transposed, bias, what] : slow) {
    const std::string why = std::string(what) + ", so that pairs are read one by one";
    Context ctx(1), strict(1);
    strict.set_strict(true);
    const Problem p = WithPairs(dtype, transposed, bias);
    EXPECT_THAT(Explain(strict, p.in, p.options).why, HasSubstr("; " + why));
    const Result r = RunForward(ctx, p);
    const std::string refused = ": " + why + ", which a strict Context forbids";
    EXPECT_THAT([&] { RunForward(strict, p); }, ThrowsMessage<Unsupported>(HasSubstr("attention::Forward" + refused)));
    const Buffer dq(dtype, p.in.q.sizes());
    const auto backward = [&](Context& on) {
      Gradients g;
      g.dq = dq.view();
      Backward(on, {p.in.q, p.in.k, p.in.v, r.o.view(), r.lse.view(), p.d_o, p.d_lse}, p.options, g);
    };
    EXPECT_THAT([&] { backward(strict); }, ThrowsMessage<Unsupported>(HasSubstr("attention::Backward" + refused)));
    EXPECT_NO_THROW(backward(ctx));

    KVCache cache({.batch = 1, .heads = 1, .dim = 4, .value_dim = 4, .dtype = dtype});
    cache.Append(p.in.k.Slice(1, 0, 2), p.in.v.Slice(1, 0, 2));
    cache.Append(p.in.k.Slice(1, 2, 7), p.in.v.Slice(1, 2, 7));
    EXPECT_THAT(ExplainAttend(strict, cache.view(), p.in.q, p.options).why, HasSubstr("; " + why));
    EXPECT_THAT([&] { Attend(strict, cache.view(), p.in.q, p.options, {r.o.view(), r.lse.view()}); },
                ThrowsMessage<Unsupported>(HasSubstr("attention::Attend" + refused)));
  }
}

TEST(AttentionOptionsTest, AStrictContextRunsWhatIsReadInRuns) {
  Context strict(1);
  strict.set_strict(true);
  for (const DType dtype : kDTypes) {
    const Problem p = WithPairs(dtype, "", dtype);
    EXPECT_THAT(Explain(strict, p.in, p.options).why, testing::Not(HasSubstr("one by one")));
    EXPECT_NO_THROW(RunBackward(strict, p));
  }
  Problem one_key = MakeProblem(DType::kF32, {1, 5, 1, 1, 1, 4, 4});  // contiguous whatever its stride
  one_key.options.bias = Keep(one_key, Buffer(DType::kF32, {5, 1}).FillConstant(1));
  EXPECT_NO_THROW(RunForward(strict, one_key));
}

TEST(AttentionOptionsTest, ExplainSaysWhereAPrecisionHasNoFasterKernel) {
  Context ctx(1);
  for (const DType dtype : kDTypes) {
    Problem p = MakeProblem(dtype, {1, 5, 7, 1, 1, 4, 4});
    EXPECT_THAT(Explain(ctx, p.in, p.options).why, testing::Not(HasSubstr("precision")));
    p.options.precision = Precision::kHigh;
    const Explanation e = Explain(ctx, p.in, p.options);
    const bool is_faster = e.kernel == "softmax_tiles" && dtype == DType::kF32;
    EXPECT_EQ(e.why.find("precision: 'high' has no faster kernel here") == std::string::npos, is_faster) << e.why;
    p.options.invariant = true;
    EXPECT_THAT(Explain(ctx, p.in, p.options).why, HasSubstr("precision: 'high' has no faster kernel here"));
  }
}

}  // namespace
}  // namespace heed::attention
