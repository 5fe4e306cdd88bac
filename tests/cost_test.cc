// The cost of attention follows the number of kept pairs: visited pairs are compared with counts that are made here,
// pair by pair, from the definition of each mask.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

// A kernel processes at most 64 rows at a time, and tiles of keys on a grid of at most 128. A block visits the union of
// the keys that its rows see, each run of keys separately and clipped to that union; it visits keys between two runs
// only if both runs are in one tile.
constexpr double kBlockRows = 64, kTileKeys = 128;

// A mask by its definition, where p is the query's position, and the maximal number of pairs that a row visits in vain.
struct MaskCase {
  std::string name;
  int64_t Tq, Tk;
  std::function<void(Problem&)> set;
  std::function<bool(int64_t p, int64_t j)> keep;
  double waste_per_row;
};

void PrintTo(const MaskCase& c, std::ostream* os) { *os << c.name; }

std::vector<MaskCase> MaskCases() {
  const auto all = [](int64_t, int64_t) { return true; };
  std::vector<MaskCase> cases;
  cases.push_back({"Full", 300, 500, [](Problem&) {}, all, 0});
  cases.push_back({"FullOneRow", 1, 1000, [](Problem&) {}, all, 0});
  // The union over R rows at successive positions is R - 1 keys longer than the keys of one row, at each end that moves
  // with the position.
  cases.push_back({"Causal", 700, 700, [](Problem& p) { p.options.causal = true; },
                   [](int64_t p, int64_t j) { return j <= p; }, kBlockRows - 1});
  cases.push_back({"CausalFewerQueries", 70, 900, [](Problem& p) { p.options.causal = true; },
                   [](int64_t p, int64_t j) { return j <= p; }, kBlockRows - 1});
  cases.push_back({"CausalMoreQueries", 900, 70, [](Problem& p) { p.options.causal = true; },
                   [](int64_t p, int64_t j) { return j <= p; }, kBlockRows - 1});
  cases.push_back({"CausalTopLeft", 300, 200,
                   [](Problem& p) {
                     p.options.causal = true;
                     p.options.align = Align::kTopLeft;
                   },
                   [](int64_t p, int64_t j) { return j <= p; }, kBlockRows - 1});
  cases.push_back({"Window", 1000, 1000, [](Problem& p) { p.options.window = {100, 30}; },
                   [](int64_t p, int64_t j) { return j >= p - 100 && j <= p + 30; }, kBlockRows - 1});
  cases.push_back({"CausalWindow", 1000, 1000,
                   [](Problem& p) {
                     p.options.causal = true;
                     p.options.window = {50, -1};
                   },
                   [](int64_t p, int64_t j) { return j >= p - 50 && j <= p; }, kBlockRows - 1});
  cases.push_back({"WindowAndSinkTokens", 1000, 1000,
                   [](Problem& p) {
                     p.options.causal = true;
                     p.options.window = {60, 0};
                     p.options.sink_tokens = 4;
                   },
                   [](int64_t p, int64_t j) { return j <= p && (j >= p - 60 || j < 4); }, kBlockRows - 1});
  // Rows of two chunks may share a block, which then visits both.
  cases.push_back({"Chunks", 600, 600, [](Problem& p) { p.options.chunk = 96; },
                   [](int64_t p, int64_t j) { return p / 96 == j / 96; }, 96});
  cases.push_back({"CausalChunks", 600, 600,
                   [](Problem& p) {
                     p.options.causal = true;
                     p.options.chunk = 200;
                   },
                   [](int64_t p, int64_t j) { return j <= p && p / 200 == j / 200; }, 200});
  cases.push_back({"Lengths", 200, 600,
                   [](Problem& p) {
                     p.options.key_lengths = KeepInts(p, {333, 333});
                     p.options.key_starts = KeepInts(p, {31, 31});
                   },
                   [](int64_t, int64_t j) { return j >= 31 && j < 333; }, 0});
  cases.push_back({"Prefix", 400, 400,
                   [](Problem& p) {
                     p.options.causal = true;
                     p.options.prefix = KeepInts(p, {100, 100});
                   },
                   [](int64_t p, int64_t j) { return j <= p || j < 100; }, kBlockRows - 1});
  return cases;
}

class Cost : public testing::TestWithParam<MaskCase> {};

INSTANTIATE_TEST_SUITE_P(Masks, Cost, testing::ValuesIn(MaskCases()),
                         [](const auto& value) { return value.param.name; });

TEST_P(Cost, VisitedPairsAreThoseKeptAndTheEdgesOfBlocks) {
  const MaskCase& c = GetParam();
  constexpr int64_t kB = 2, kHeads = 4, kD = 24, kDv = 40;
  double kept = 0, rows = 0, sinks = 0;
  for (int64_t i = 0; i < c.Tq; ++i) {
    const int64_t position = (c.name == "CausalTopLeft" ? 0 : c.Tk - c.Tq) + i;
    for (int64_t j = 0; j < c.Tk; ++j) kept += c.keep(position, j);
  }
  kept *= kB * kHeads;
  rows = static_cast<double>(kB * kHeads * c.Tq);
  // At the boundary between the window and the sink tokens, one tile may contain keys of both.
  if (c.name == "WindowAndSinkTokens") sinks = kB * kHeads * 2 * kBlockRows * kTileKeys;

  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const std::string& target : AvailableTargets(dtype)) {
      Context ctx(1);
      ctx.set_isa(target);
      Problem p = MakeProblem(dtype, {.B = kB, .Tq = c.Tq, .Tk = c.Tk, .Hq = kHeads, .Hkv = 2, .D = kD, .Dv = kDv});
      c.set(p);
      const Explanation e = Explain(ctx, p.in, p.options);
      EXPECT_EQ(e.flops, 2 * (kD + kDv) * kept);
      EXPECT_GE(e.visited_pairs, kept);
      // Runs of keys are rounded to whole AMX steps.
      const double steps = target == "tiles" ? rows * 2 * 31 + sinks : 0;
      EXPECT_LE(e.visited_pairs, kept + rows * c.waste_per_row + sinks + steps);
      if (c.waste_per_row == 0 && target != "tiles") {
        EXPECT_EQ(e.visited_pairs, kept);
      }
      EXPECT_EQ(e.target, target);
      EXPECT_FALSE(e.kernel.empty());
      EXPECT_FALSE(e.why.empty());
    }
  }
}

TEST(CostTest, MaskedTilesAreNotVisited) {
  // The mask keeps the keys of one tile for the first half of the rows, and segments keep a quarter of them.
  Context ctx(1);
  Problem p = MakeProblem(DType::kF32, {.B = 1, .Tq = 256, .Tk = 1024, .Hq = 1, .Hkv = 1, .D = 8, .Dv = 8});
  const Buffer mask(DType::kBool, {256, 1024});
  mask.FillConstant(0);
  for (int64_t i = 0; i < 128; ++i) {
    for (int64_t j = 256; j < 384; ++j) mask.Set({i, j}, 1);
  }
  p.options.mask = Keep(p, mask);
  Explanation e = Explain(ctx, p.in, p.options);
  EXPECT_EQ(e.flops, 2 * 16 * 128.0 * 128);
  EXPECT_EQ(e.visited_pairs, 128.0 * 128);

  p.options.mask = {};
  const Buffer q(DType::kI32, {1, 256}), k(DType::kI32, {1, 1024});
  for (int64_t i = 0; i < 256; ++i) q.Set({0, i}, static_cast<double>(i / 64));
  for (int64_t j = 0; j < 1024; ++j) k.Set({0, j}, static_cast<double>(j / 256));
  p.options.segments_q = Keep(p, q);
  p.options.segments_k = Keep(p, k);
  e = Explain(ctx, p.in, p.options);
  EXPECT_EQ(e.flops, 2 * 16 * 256.0 * 256);
  EXPECT_EQ(e.visited_pairs, 256.0 * 256);
}

TEST(CostTest, PackedSequencesVisitTheirOwnPairs) {
  Context ctx(1);
  Problem p;
  const Buffer q(DType::kF32, {500, 2, 8});
  p.in = {Keep(p, q), Keep(p, q), Keep(p, q)};
  p.options.cu_seqlens_q = KeepInts(p, {0, 100, 100, 350, 480});
  const double kept = 2 * (100.0 * 100 + 250.0 * 250 + 130.0 * 130);
  const Explanation e = Explain(ctx, p.in, p.options);
  EXPECT_EQ(e.visited_pairs, kept);
  EXPECT_EQ(e.flops, 2 * 16 * kept);
}

TEST(CostTest, RandomProblemsKeepTheFlopsOfTheirPairs) {
  Context ctx(1);
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Problem p = RandomProblem(DType::kF32, seed);
    p.options.bias = {};  // its -inf are not counted as kept pairs
    double kept = 0;
    for (auto& buffer : p.memory) {  // logits of -inf are kept pairs too
      if (buffer.view().data() == p.in.q.data()) buffer.FillConstant(0.5);
      if (buffer.view().data() == p.in.k.data()) buffer.FillConstant(0.5);
    }
    p.options.alibi = {};
    p.options.relative_bias = {};  // nor are those of a relative bias or of log decays
    p.options.log_decay = {};
    p.options.scale = 1;
    ForEachRow(p, [&](int64_t, int64_t, int64_t, const std::vector<int64_t>& keys) {
      kept += static_cast<double>(keys.size());
    });
    const Explanation e = Explain(ctx, p.in, p.options);
    const int last = p.in.q.rank() - 1;
    EXPECT_EQ(e.flops, 2 * static_cast<double>(p.in.q.size(last) + p.in.v.size(last)) * kept) << Title(p);
    EXPECT_GE(e.visited_pairs, kept) << Title(p);
  }
}

TEST(CostTest, ExplainNeedsShapesAlone) {
  Context ctx(1);
  const int64_t sizes[] = {2, int64_t{1} << 20, 8, 64};
  const ConstTensorView q(nullptr, DType::kF32, sizes);
  Options options;
  options.window = {511, 0};
  const Explanation e = Explain(ctx, {q, q, q}, options);
  const double rows = 2.0 * 8 * (1 << 20);
  EXPECT_LE(e.visited_pairs, rows * (512 + 63 + 2 * 31));  // AMX steps have 32 keys
  EXPECT_EQ(e.workspace_bytes, Workspace(ctx, {q, q, q}, options));
  EXPECT_LT(e.workspace_bytes, 256 << 20);  // no N x N array
}

// The test is not a benchmark: the dense problem has 16 times the pairs, so the bound of a half has room for a busy
// machine.
TEST(CostTest, AWindowCostsWhatAWindowContains) {
  Context ctx(1);
  Problem p = MakeProblem(DType::kF32, {.B = 1, .Tq = 8192, .Tk = 8192, .Hq = 1, .Hkv = 1, .D = 32, .Dv = 32});
  const auto seconds = [&] {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const double begin = os::ThreadCpuSeconds();  // CPU time does not depend on other processes
      RunForward(ctx, p);
      best = std::min(best, os::ThreadCpuSeconds() - begin);
    }
    return best;
  };
  const double dense = seconds();
  p.options.window = {255, 256};
  EXPECT_LT(seconds(), dense / 8);
}

// The formulas of the entries: a fraction of a limit is only as good as the count of operations.
TEST(CostTest, CasesOfScansCountOperationsAsTheirFormulasSay) {
  const Sizes sizes = {2, 100, 100, 3, 3, 40, 40};
  constexpr double kElements = 2 * 100 * 3 * 40;
  for (const auto& [name, each] : {std::pair{"selective_scan", 7.0 * 16},
                                   {"s4d", 8.0 * 32},
                                   {"h3", 8.0 * 32 * 8},
                                   {"rg_lru", 30.0},
                                   {"hgrn", 2.0}}) {
    const auto flops = [&](const char* pass) {
      return FindOp(name).make_case(CaseRequest{sizes, DType::kF32, 1, pass, ""}).flops;
    };
    EXPECT_EQ(flops("forward"), each * kElements) << name;
    EXPECT_EQ(flops("backward"), 3 * each * kElements) << name;
  }
}

}  // namespace
}  // namespace heed::attention
