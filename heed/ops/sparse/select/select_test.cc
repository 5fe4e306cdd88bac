// Selectors against their references and definitions: random calls, ties, NaN, invariance of bits, errors.
#include "heed/ops/sparse/select/select.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/select/select_case.h"
#include "heed/ops/sparse/select/select_reference_internal.h"

namespace heed::select {
namespace {

using patterns::Table;
using testing::HasSubstr;
using testing::ThrowsMessage;

const Table& TableOf(const Pattern& pattern, size_t which = 0) {
  return std::get<Table>(pattern.node()->values[which]);
}

// The entries of a row of a table, in any order, without -1.
std::set<int64_t> RowOf(const Table& table, int64_t b, int64_t row, int64_t head) {
  const int64_t heads = table.rank() == 4 ? table.size(2) : 1, n = table.size(-1);
  const int64_t begin = ((b * table.size(1) + row) * heads + head) * n;
  std::set<int64_t> listed;
  for (int64_t i = begin; i < begin + n; ++i) {
    if (table.values[static_cast<size_t>(i)] >= 0) listed.insert(table.values[static_cast<size_t>(i)]);
  }
  return listed;
}

// Rounding error of scores of D products of numbers of about 1.
double Tolerance(DType dtype) { return dtype == DType::kF64 ? 1e-11 : 1e-3; }

double OrLowest(double x) { return std::isnan(x) ? -std::numeric_limits<double>::infinity() : x; }

// Expects `count` of the scored candidates in `chosen`, none worse than another candidate by more than rounding.
void ExpectBest(const std::set<int64_t>& chosen, const std::map<int64_t, double>& scores, int64_t count,
                double tolerance) {
  ASSERT_EQ(std::ssize(chosen), std::clamp<int64_t>(count, 0, std::ssize(scores)));
  double worst = std::numeric_limits<double>::infinity(), best_left = -worst;
  for (const auto& [index, score] : scores) {
    if (chosen.contains(index)) {
      worst = std::min(worst, OrLowest(score));
    } else {
      best_left = std::max(best_left, OrLowest(score));
    }
  }
  for (const int64_t index : chosen) ASSERT_TRUE(scores.contains(index)) << index;
  ASSERT_GE(worst, best_left - tolerance);
}

std::set<int64_t> Without(std::set<int64_t> all, const std::set<int64_t>& some) {
  for (const int64_t x : some) all.erase(x);
  return all;
}

// Sets one of the supported targets.
void SetTarget(Context& ctx, uint64_t seed) {
  const std::vector<std::string> targets = AvailableTargets();
  ctx.set_isa(targets[seed % targets.size()]);
}

TEST(SelectTest, TopBlocksAreThoseOfTheReference) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(seed);
    RandomBlocks x(seed);
    Context ctx(1);
    SetTarget(ctx, seed);
    const TopBlocksOptions options = x.top_blocks();
    const Pattern pattern = TopBlocks(ctx, x.q.view(), x.k.view(), options);
    const Table& table = TableOf(pattern);
    const int64_t heads = options.share == Share::kHead ? x.Hq : x.Hkv;
    ASSERT_EQ(table.shape, (std::vector<int64_t>{x.B, x.Tq, heads, table.size(3)}));
    ASSERT_EQ(std::get<int64_t>(pattern.node()->values[1]), x.block);
    const Table exact = x.exact ? TableOf(TopBlocksReference(x.q.view(), x.k.view(), options)) : Table();
    for (int64_t b = 0; b < x.B; ++b) {
      for (int64_t row = 0; row < x.Tq; ++row) {
        for (int64_t head = 0; head < heads; ++head) {
          const std::set<int64_t> chosen = RowOf(table, b, row, head);
          if (x.exact) {
            ASSERT_EQ(chosen, RowOf(exact, b, row, head)) << b << " " << row << " " << head;
            continue;
          }
          const RowScores scores = ScoresOfRow(x.q.view(), x.k.view(), options, b, row, head);
          ASSERT_TRUE(std::ranges::includes(chosen, scores.kept));
          ExpectBest(Without(chosen, scores.kept), scores.others, options.count - (scores.has_own ? 1 : 0),
                     Tolerance(x.dtype));
          ASSERT_FALSE(testing::Test::HasFatalFailure()) << b << " " << row << " " << head;
        }
      }
    }
  }
}

TEST(SelectTest, CumulativeHoldsItsMassInTheFewestBlocks) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(seed);
    RandomBlocks x(seed);
    Context ctx(1);
    SetTarget(ctx, seed);
    const CumulativeOptions options = x.cumulative();
    const Pattern pattern = Cumulative(ctx, x.q.view(), x.k.view(), options);
    const Table& table = TableOf(pattern);
    const int64_t heads = options.share == Share::kHead ? x.Hq : x.Hkv;
    ASSERT_EQ(table.shape, (std::vector<int64_t>{x.B, x.Tq, heads, table.size(3)}));
    const double tolerance = x.dtype == DType::kF64 ? 1e-12 : 1e-4;
    for (int64_t b = 0; b < x.B; ++b) {
      for (int64_t row = 0; row < x.Tq; ++row) {
        for (int64_t head = 0; head < heads; ++head) {
          const std::set<int64_t> chosen = RowOf(table, b, row, head);
          const RowWeights weights = WeightsOfRow(x.q.view(), x.k.view(), options, b, row, head);
          ASSERT_TRUE(std::ranges::includes(chosen, weights.kept));
          const std::set<int64_t> others = Without(chosen, weights.kept);
          ExpectBest(others, weights.others, std::ssize(others), tolerance);
          ASSERT_FALSE(testing::Test::HasFatalFailure()) << b << " " << row << " " << head;
          double held = weights.held, all = held, least = std::numeric_limits<double>::infinity();
          for (const auto& [block, weight] : weights.others) {
            all += weight;
            if (!others.contains(block)) continue;
            held += weight;
            least = std::min(least, weight);
          }
          ASSERT_GE(held, options.mass * all - tolerance);
          if (!others.empty()) {
            ASSERT_LT(held - least, options.mass * all + tolerance);
          }
        }
      }
    }
  }
}

TEST(SelectTest, CumulativeIsThatOfTheReferenceWhereNothingRounds) {
  // One feature and equal keys within a block: weights differ by constant factors.
  for (const double mass : {0.05, 0.5, 0.64, 0.9, 0.99, 1.0}) {
    const Buffer q(DType::kF32, {1, 120, 2, 1}), k(DType::kF32, {1, 120, 1, 1});
    q.FillNormal(3);
    for (int64_t j = 0; j < 120; ++j) k.Set({0, j, 0, 0}, static_cast<double>(j / 10 * 7 % 12) / 2);
    CumulativeOptions options;
    options.mass = mass;
    options.block = 10;
    options.sinks = 1;
    options.share = Share::kHead;
    Context ctx(1);
    const Table chosen = TableOf(Cumulative(ctx, q.view(), k.view(), options));
    const Table expected = TableOf(CumulativeReference(q.view(), k.view(), options));
    for (int64_t row = 0; row < 120; ++row) {
      for (int64_t head = 0; head < 2; ++head)
        EXPECT_EQ(RowOf(chosen, 0, row, head), RowOf(expected, 0, row, head)) << mass << " " << row;
    }
  }
}

struct RandomIndexer {
  explicit RandomIndexer(uint64_t seed) : random(seed) {
    exact = seed % 3 == 0;
    dtype = random.Pick({DType::kF32, DType::kF64, DType::kBF16, DType::kF16});
    B = random.Integer(1, 2);
    Hi = random.Integer(0, 4);
    Di = random.Integer(1, 40);
    Tk = random.Integer(0, 300);
    Tq = random.Integer(0, 40);
    q = Filled({B, Tq, Hi, Di}, 1);
    k = Filled({B, Tk, Di}, 2);
    weights = Filled({B, Tq, Hi}, 3);
    if (!exact && k.view().num_elements() > 0 && random.Chance(0.3)) {
      k.Set({0, random.Integer(0, Tk - 1), random.Integer(0, Di - 1)}, std::nan(""));
    }
    options.count = random.Chance(0.1) ? 1 << 20 : random.Integer(1, 40);
    options.causal = random.Chance(0.7);
    if (random.Chance(0.3)) {
      options.ratio = random.Integer(1, 5);
      options.start = random.Integer(-3, options.ratio * Tk);
    }
  }
  Buffer Filled(const std::vector<int64_t>& shape, uint64_t stream) {
    const Buffer buffer(dtype, shape);
    buffer.FillNormal(random.Word() + stream);
    std::vector<int64_t> index(shape.size());
    if (!exact || buffer.view().num_elements() == 0) return buffer;
    do SetElement(buffer.view(), index, std::round(GetElement(buffer.view(), index)));
    while (NextIndex(buffer.view().sizes(), index));
    return buffer;
  }

  Random random;
  bool exact;
  DType dtype;
  int64_t B, Hi, Di, Tk, Tq;
  Buffer q, k, weights;
  IndexerOptions options;
};

TEST(SelectTest, TheIndexersKeysAreThoseOfTheReference) {
  EXPECT_TRUE(IndexerOptions().causal);
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    const RandomIndexer x(seed);
    Context ctx(1);
    SetTarget(ctx, seed);
    const Pattern pattern = Indexer(ctx, x.q.view(), x.k.view(), x.weights.view(), x.options);
    const Table exact =
        x.exact ? TableOf(IndexerReference(x.q.view(), x.k.view(), x.weights.view(), x.options)) : Table();
    EXPECT_EQ(pattern.node()->builder, "keys");
    for (int64_t b = 0; b < x.B; ++b) {
      for (int64_t row = 0; row < x.Tq; ++row) {
        const std::set<int64_t> chosen = RowOf(TableOf(pattern), b, row, 0);
        if (x.exact) {
          ASSERT_EQ(chosen, RowOf(exact, b, row, 0)) << row;
        } else {
          const auto scores = IndexerScores(x.q.view(), x.k.view(), x.weights.view(), x.options, b, row);
          ExpectBest(chosen, scores, x.options.count, Tolerance(x.dtype));
          ASSERT_FALSE(testing::Test::HasFatalFailure()) << row;
        }
      }
    }
  }
}

TEST(SelectTest, ColumnsAndDiagonalsAreThoseOfTheReference) {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(seed);
    RandomBlocks x(seed);
    if (x.Tq == 0 || x.Tk == 0) continue;
    Context ctx(1);
    SetTarget(ctx, seed);
    VerticalSlashOptions options;
    options.verticals = x.random.Integer(0, 60);
    options.slashes = x.random.Integer(0, 60);
    options.last = x.random.Integer(1, 100);
    options.sinks = x.random.Integer(0, 20);
    options.local = x.random.Integer(0, 20);
    const Pattern pattern = VerticalSlash(ctx, x.q.view(), x.k.view(), options);
    for (int64_t b = 0; b < x.B; ++b) {
      for (int64_t head = 0; head < x.Hq; ++head) {
        const HeadSums sums = SumsOfHead(x.q.view(), x.k.view(), options, b, head);
        for (const size_t which : {size_t{0}, size_t{1}}) {
          const std::vector<double>& of = which == 0 ? sums.by_key : sums.by_distance;
          const int64_t forced = which == 0 ? options.sinks : options.local;
          const std::set<int64_t> chosen = RowOf(TableOf(pattern, which), b, head, 0);
          std::set<int64_t> kept;
          std::map<int64_t, double> others;
          for (int64_t i = 0; i < x.Tk; ++i) {
            if (i < forced)
              kept.insert(i);
            else
              others[i] = of[static_cast<size_t>(i)];
          }
          ASSERT_TRUE(std::ranges::includes(chosen, kept));
          ExpectBest(Without(chosen, kept), others,
                     (which == 0 ? options.verticals : options.slashes) - std::ssize(kept),
                     x.dtype == DType::kF64 ? 1e-12 : 1e-4);
          ASSERT_FALSE(testing::Test::HasFatalFailure()) << b << " " << head << " " << which;
        }
      }
    }
    // The lists of tiles have the pairs of the definition, whatever the positions of the rows.
    PatternCall call = {.Tq = x.Tq, .Tk = x.Tk, .query_heads = x.Hq, .key_heads = x.Hkv, .starts = {}};
    for (int64_t b = 0; b < x.B; ++b) call.starts.push_back(x.random.Integer(-30, x.Tk));
    const auto mask = patterns::Compile(pattern, call);
    for (int64_t b = 0; b < x.B; ++b) {
      for (int64_t row = 0; row < x.Tq; row += 7) {
        std::vector<uint64_t> words(static_cast<size_t>(x.Tk / 64 + 1));
        for (const auto& entry : mask->Of(b, 0, row))
          words.at(static_cast<size_t>(entry.tile)) = mask->WordOf(entry, row);
        for (int64_t key = 0; key < x.Tk; ++key) {
          ASSERT_EQ((words[static_cast<size_t>(key / 64)] >> (key % 64) & 1) != 0,
                    patterns::Keeps(pattern, call, b, 0, row, key))
              << row << " " << key;
        }
      }
    }
  }
}

// --- what choices do not depend on -------------------------------------------------------------

TEST(SelectTest, ThreadsBatchStridesAndCallsChangeNoChoice) {
  const Buffer q(DType::kBF16, {2, 300, 4, 40}), k(DType::kBF16, {2, 300, 2, 40});
  q.FillNormal(1);
  k.FillNormal(2);
  // Tensors of the same numbers, with the axis of heads before tokens.
  const Buffer strided_q(DType::kBF16, std::vector<int64_t>{2, 300, 4, 40},
                         std::vector<int64_t>{300 * 200, 50, 300 * 50, 1}, Placement::kAfterGuard);
  std::vector<int64_t> index(4);
  do SetElement(strided_q.view(), index, GetElement(q.view(), index));
  while (NextIndex(q.view().sizes(), index));

  TopBlocksOptions top;
  top.count = 4;
  top.block = 16;
  CumulativeOptions held;
  held.block = 16;
  held.mass = 0.6;
  using Select = std::function<Table(Context&, const ConstTensorView&, const ConstTensorView&)>;
  const Select selects[] = {
      [&](Context& ctx, const ConstTensorView& a, const ConstTensorView& b) {
        return TableOf(TopBlocks(ctx, a, b, top));
      },
      [&](Context& ctx, const ConstTensorView& a, const ConstTensorView& b) {
        return TableOf(Cumulative(ctx, a, b, held));
      },
      [&](Context& ctx, const ConstTensorView& a, const ConstTensorView& b) {
        return TableOf(VerticalSlash(ctx, a, b, {.verticals = 50, .slashes = 50, .last = 30, .sinks = 2, .local = 3}));
      },
      [&](Context& ctx, const ConstTensorView& a, const ConstTensorView& b) {
        const Buffer w(DType::kBF16, {a.size(0), a.size(1), 4});
        w.FillConstant(0.5);
        const ConstTensorView keys(b.data(), b.dtype(), std::vector<int64_t>{b.size(0), b.size(1), 40},
                                   std::vector<int64_t>{b.stride(0), b.stride(1), 1});
        return TableOf(Indexer(ctx, a, keys, w.view(), {.count = 30}));
      }};
  for (const Select& select : selects) {
    Context ctx(1), three(3);
    const Table all = select(ctx, q.view(), k.view());
    EXPECT_EQ(select(three, q.view(), k.view()).values, all.values);
    EXPECT_EQ(select(ctx, strided_q.view(), k.view()).values, all.values);
    const Table second = select(ctx, q.view().Slice(0, 1, 2), k.view().Slice(0, 1, 2));
    for (int64_t row = 0; row < second.size(1); ++row) {
      for (int64_t head = 0; head < (second.rank() == 4 ? 2 : 1); ++head) {
        ASSERT_EQ(RowOf(second, 0, row, head), RowOf(all, 1, row, head));
      }
    }
    // Takes rows at the end, as a cache has; VerticalSlash depends on the last rows, so it needs the whole call.
    if (all.size(1) != 300) continue;
    const Table end = select(ctx, q.view().Slice(1, 217, 300), k.view());
    for (int64_t row = 0; row < 83; ++row) {
      for (int64_t head = 0; head < (end.rank() == 4 ? 2 : 1); ++head) {
        ASSERT_EQ(RowOf(end, 1, row, head), RowOf(all, 1, 217 + row, head));
      }
    }
  }
}

TEST(SelectTest, PaddingIsNoBlockAndChangesNoChoice) {
  const Buffer q(DType::kF32, {1, 200, 2, 24}), k(DType::kF32, {1, 200, 1, 24});
  q.FillNormal(1);
  k.FillNormal(2);
  const Buffer longer(DType::kF32, {1, 333, 1, 24});  // NaN except in those keys
  for (int64_t j = 0; j < 200; ++j) {
    for (int64_t d = 0; d < 24; ++d) longer.Set({0, j, 0, d}, k.Get({0, j, 0, d}));
  }
  const Buffer lengths = Ints({200}), starts = Ints({0});
  for (const Score score : {Score::kMean, Score::kBox}) {
    for (const bool causal : {true, false}) {
      TopBlocksOptions options;
      options.count = 3;
      options.block = 30;
      options.score = score;
      options.causal = causal;
      Context ctx(1);
      const Table alone = TableOf(TopBlocks(ctx, q.view(), k.view(), options));
      options.key_lengths = lengths.view();
      options.query_starts = starts.view();
      const Table padded = TableOf(TopBlocks(ctx, q.view(), longer.view(), options));
      EXPECT_EQ(alone.values, padded.values);
    }
  }
}

// --- as others define it -----------------------------------------------------------------------

// A block that every row would select first is selected by none if one of its keys is NaN.
TEST(SelectTest, ABlockWithANaNComesLast) {
  const int64_t T = 320, block = 32, best = 3, D = 5;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const Score score : {Score::kMean, Score::kBox}) {
      for (uint64_t target = 0; target < AvailableTargets().size(); ++target) {
        const Buffer q(dtype, {1, T, 1, D}), k(dtype, {1, T, 1, D});
        for (int64_t i = 0; i < T; ++i) {
          for (int64_t d = 0; d < D; ++d) {
            q.Set({0, i, 0, d}, 1);
            k.Set({0, i, 0, d}, i / block == best ? 5 : 1);
          }
        }
        TopBlocksOptions options;
        options.count = 3;
        options.block = block;
        options.score = score;
        Context ctx(1);
        SetTarget(ctx, target);
        const auto last_row = [&] { return RowOf(TableOf(TopBlocks(ctx, q.view(), k.view(), options)), 0, T - 1, 0); };
        EXPECT_TRUE(last_row().contains(best));
        k.Set({0, best * block + 7, 0, D - 1}, std::nan(""));
        EXPECT_FALSE(last_row().contains(best));
      }
    }
  }
}

// MoBA: the gate is q times the mean of a chunk, minus infinity from the own chunk on, plus infinity at it; the k best.
TEST(SelectTest, MobaIsASetting) {
  const int64_t T = 130, chunk = 16, top = 3, D = 8;
  const Buffer q(DType::kF64, {1, T, 1, D}), k(DType::kF64, {1, T, 1, D});
  q.FillNormal(5);
  k.FillNormal(6);
  TopBlocksOptions options;
  options.count = top;
  options.block = chunk;
  Context ctx(1);
  const Table table = TableOf(TopBlocks(ctx, q.view(), k.view(), options));
  for (int64_t i = 0; i < T; ++i) {
    std::vector<std::pair<double, int64_t>> gate;
    for (int64_t c = 0; c * chunk < T; ++c) {
      double score = 0;
      for (int64_t j = c * chunk; j < std::min(T, (c + 1) * chunk); ++j) {
        for (int64_t d = 0; d < D; ++d) score += q.Get({0, i, 0, d}) * k.Get({0, j, 0, d}) / static_cast<double>(chunk);
      }
      if (c == i / chunk) score = std::numeric_limits<double>::infinity();
      if (c <= i / chunk) gate.emplace_back(-score, c);
    }
    std::ranges::sort(gate);
    std::set<int64_t> expected;
    for (int64_t n = 0; n < std::min<int64_t>(top, std::ssize(gate)); ++n)
      expected.insert(gate[static_cast<size_t>(n)].second);
    ASSERT_EQ(RowOf(table, 0, i, 0), expected) << i;
  }
}

// Quest, for one step of decoding: the last page, and the pages with the largest bound, budget / page in all.
TEST(SelectTest, QuestIsASetting) {
  const int64_t T = 500, page = 16, D = 8;
  const Buffer q(DType::kF64, {1, 1, 2, D}), k(DType::kF64, {1, T, 2, D});
  q.FillNormal(7);
  k.FillNormal(8);
  TopBlocksOptions options;
  options.count = 6;
  options.block = page;
  options.score = Score::kBox;
  options.share = Share::kHead;
  Context ctx(1);
  const Table table = TableOf(TopBlocks(ctx, q.view(), k.view(), options));
  for (int64_t h = 0; h < 2; ++h) {
    std::vector<std::pair<double, int64_t>> bounds;
    for (int64_t c = 0; c < T / page; ++c) {  // whole pages
      double bound = 0;
      for (int64_t d = 0; d < D; ++d) {
        double best = -std::numeric_limits<double>::infinity();
        for (int64_t j = c * page; j < (c + 1) * page; ++j)
          best = std::max(best, q.Get({0, 0, h, d}) * k.Get({0, j, h, d}));
        bound += best;
      }
      bounds.emplace_back(-bound, c);
    }
    std::ranges::sort(bounds);
    std::set<int64_t> expected = {T / page};
    for (size_t n = 0; n < 5; ++n) expected.insert(bounds[n].second);
    EXPECT_EQ(RowOf(table, 0, 0, h), expected);
  }
}

TEST(SelectTest, EnoughBlocksAreDenseAttentionBitForBit) {
  const Buffer q(DType::kF32, {2, 150, 4, 24}), k(DType::kF32, {2, 200, 2, 24}), v(DType::kF32, {2, 200, 2, 16});
  q.FillNormal(1);
  k.FillNormal(2);
  v.FillNormal(3);
  for (const bool causal : {true, false}) {
    TopBlocksOptions options;
    options.count = 7;
    options.block = 32;  // 7 * 32 >= 200
    options.causal = causal;
    Context ctx(2);
    attention::Options dense, sparse;
    dense.causal = sparse.causal = causal;
    dense.invariant = true;  // lists of blocks are not computed with AMX
    sparse.pattern = TopBlocks(ctx, q.view(), k.view(), options);
    const Buffer a(DType::kF32, {2, 150, 4, 16}), b(DType::kF32, {2, 150, 4, 16});
    attention::Forward(ctx, {q.view(), k.view(), v.view()}, dense, {a.view(), {}});
    attention::Forward(ctx, {q.view(), k.view(), v.view()}, sparse, {b.view(), {}});
    EXPECT_TRUE(SameBits(a.view(), b.view()));
  }
}

TEST(SelectTest, AChoiceCostsNoMoreThanIsListed) {
  const Buffer q(DType::kF32, {1, 64, 1, 8}), k(DType::kF32, {1, 4096, 1, 8});
  q.FillNormal(1);
  k.FillNormal(2);
  TopBlocksOptions options;
  options.count = 5;
  options.sinks = 1;
  options.local = 3;
  Context ctx(1);
  EXPECT_EQ(TableOf(TopBlocks(ctx, q.view(), k.view(), options)).shape, (std::vector<int64_t>{1, 64, 1, 8}));
}

TEST(SelectTest, SizesMayBeZero) {
  Context ctx(1);
  TopBlocksOptions top;
  top.count = 2;
  for (const auto& [B, Tq, Tk] : {std::tuple{0, 3, 5}, {2, 0, 5}, {2, 3, 0}, {0, 0, 0}}) {
    const Buffer q(DType::kF32, {B, Tq, 2, 4}), k(DType::kF32, {B, Tk, 1, 4}), index(DType::kF32, {B, Tk, 4}),
        w(DType::kF32, {B, Tq, 2});
    EXPECT_EQ(TableOf(TopBlocks(ctx, q.view(), k.view(), top)).size(1), Tq);
    EXPECT_EQ(TableOf(Cumulative(ctx, q.view(), k.view(), {})).size(1), Tq);
    EXPECT_EQ(TableOf(VerticalSlash(ctx, q.view(), k.view(), {})).size(1), 2);
    EXPECT_EQ(TableOf(Indexer(ctx, q.view(), index.view(), w.view(), {})).size(1), Tq);
  }
}

// --- errors ------------------------------------------------------------------------------------

TEST(SelectTest, BadArgumentsAreNamed) {
  Context ctx(1);
  const Buffer q(DType::kF32, {2, 10, 4, 8}), k(DType::kF32, {2, 20, 2, 8}), w(DType::kF32, {2, 10, 4}),
      ki(DType::kF32, {2, 20, 8});
  const auto top = [&](const std::function<void(TopBlocksOptions&)>& change) {
    return [&, change] {
      TopBlocksOptions options;
      options.count = 2;
      change(options);
      TopBlocks(ctx, q.view(), k.view(), options);
    };
  };
  const auto says = [](const std::function<void()>& call, const char* text) {
    EXPECT_THAT(call, ThrowsMessage<InvalidArgument>(HasSubstr(text)));
  };
  says(top([](auto& o) { o.count = 0; }), "select::TopBlocks: count is 0, expected 1 or more");
  says(top([](auto& o) { o.block = 0; }), "select::TopBlocks: block is 0, expected 1 or more");
  says(top([](auto& o) { o.sinks = -1; }), "select::TopBlocks: sinks is -1, expected 0 or more");
  says(top([](auto& o) { o.local = -2; }), "select::TopBlocks: local is -2, expected 0 or more");
  const Buffer lengths = Ints({5, 21}), three = Ints({1, 2, 3});
  says(top([&](auto& o) { o.key_lengths = lengths.view(); }),
       "select::TopBlocks: key_lengths contains 21, expected 0 to 20");
  says(top([&](auto& o) { o.key_starts = three.view(); }), "select::TopBlocks: key_starts has shape [3], expected [2]");
  says(top([&](auto& o) { o.query_starts = three.view(); }),
       "select::TopBlocks: query_starts has shape [3], expected [2]");
  for (const double mass : {0.0, -0.5, 1.5, std::nan("")}) {
    CumulativeOptions options;
    options.mass = mass;
    says([&] { Cumulative(ctx, q.view(), k.view(), options); }, "select::Cumulative: mass is ");
  }
  TopBlocksOptions two;
  two.count = 2;
  const Buffer other(DType::kF32, {2, 20, 2, 9}), wide(DType::kF64, {2, 20, 2, 8}), odd(DType::kF32, {2, 20, 3, 8});
  says([&] { TopBlocks(ctx, q.view(), other.view(), two); },
       "select::TopBlocks: k has shape [2,20,2,9], expected [2,20,2,8]");
  says([&] { TopBlocks(ctx, q.view(), wide.view(), two); }, "select::TopBlocks: k has dtype f64, expected f32 as q");
  says([&] { TopBlocks(ctx, q.view(), odd.view(), two); },
       "select::TopBlocks: q has 4 heads, expected a multiple of the 3 heads of k");
  says([&] { TopBlocks(ctx, {}, k.view(), two); }, "select::TopBlocks: q is absent");
  says([&] { VerticalSlash(ctx, q.view(), k.view(), {.last = 0}); },
       "select::VerticalSlash: last is 0, expected 1 or more");
  says([&] { VerticalSlash(ctx, q.view(), k.view(), {.verticals = -1}); },
       "select::VerticalSlash: verticals is -1, expected 0 or more");
  says([&] { Indexer(ctx, q.view(), ki.view(), w.view(), {.count = 0}); },
       "select::Indexer: count is 0, expected 1 or more");
  says([&] { Indexer(ctx, q.view(), ki.view(), w.view(), {.ratio = 0}); },
       "select::Indexer: ratio is 0, expected 1 or more");
  says([&] { Indexer(ctx, q.view(), ki.view(), w.view(), {.ratio = 4}); },
       "select::Indexer: start is absent, expected the position of query 0");
  says([&] { Indexer(ctx, q.view(), k.view(), w.view(), {}); },
       "select::Indexer: k has shape [2,20,2,8], expected [B, Tk, Di]");
  says([&] { Indexer(ctx, q.view(), ki.view(), q.view(), {}); },
       "select::Indexer: weights has shape [2,10,4,8], expected [B, Tq, Hi]");
  const Buffer few(DType::kF32, {2, 10, 3});
  says([&] { Indexer(ctx, q.view(), ki.view(), few.view(), {}); },
       "select::Indexer: weights has shape [2,10,3], expected [2,10,4]");
  says([&] { Indexer(ctx, q.view(), {}, w.view(), {}); }, "select::Indexer: k is absent");
}

TEST(SelectTest, APatternOfColumnsFitsItsBatchAndHeads) {
  Context ctx(1);
  const Buffer q(DType::kF32, {1, 10, 4, 8}), k(DType::kF32, {1, 20, 2, 8});
  q.FillNormal(1);
  k.FillNormal(2);
  attention::Options options;
  options.pattern = VerticalSlash(ctx, q.view(), k.view(), {.verticals = 3, .slashes = 3, .sinks = 1, .local = 1});
  const Buffer two(DType::kF32, {1, 10, 2, 8}), o(DType::kF32, {1, 10, 2, 8});
  EXPECT_THAT([&] { attention::Forward(ctx, {two.view(), k.view(), k.view()}, options, {o.view(), {}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("columns and slashes of 4 heads, expected 2")));
}

}  // namespace
}  // namespace heed::select
