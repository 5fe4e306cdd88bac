// Bounds from a sketch: they hold for random keys, and some keys reach them, so that they cannot be tightened.
#include "heed/engines/softmax/certified/sketch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/state/sketch_internal.h"

namespace heed::softmax {
namespace {

constexpr int64_t kKeys = 64;

// A few blocks of keys [blocks 64, D], their sketch, and query rows [rows, D].
struct Problem {
  Buffer keys, queries;
  int64_t dim, blocks, rows;
  double scale = 0.3;
  std::vector<int64_t> visible;

  Problem(int64_t d, int64_t n, int64_t r)
      : keys(DType::kF32, {n * kKeys, d}), queries(DType::kF32, {r, d}), dim(d), blocks(n), rows(r),
        visible(static_cast<size_t>(r), n * kKeys) {}

  double Logit(int64_t r, int64_t j) const {
    double sum = 0;
    for (int64_t e = 0; e < dim; ++e) sum += queries.Get({r, e}) * keys.Get({j, e});
    return scale * sum;
  }
};

struct Sums {
  std::vector<float> logit, upper, lower;  // [rows, blocks]
  std::vector<float> level;                // [rows]; the sums are relative to it after `level` has run
};

Sums Scored(const Context& ctx, const Problem& p, bool leveled) {
  const os::ScopedFloatControl control;
  const SketchBlocks layout = SketchLayout(p.dim);
  const Buffer memory(DType::kF32, {p.blocks, layout.block_stride / 4}, Placement::kAligned);
  SketchWriter writer(DType::kF32, p.dim);
  std::vector<const std::byte*> blocks;
  for (int64_t j = 0; j < p.blocks * kKeys; ++j) {
    std::byte* const block = memory.as<std::byte>() + j / kKeys * layout.block_stride;
    if (j % kKeys == 0) blocks.push_back(block);
    writer.WriteRow(p.keys.as<std::byte>() + j * p.dim * 4, j % kKeys, block);
  }
  SketchQueries queries;
  std::vector<int32_t> words(static_cast<size_t>(SketchQueries::NumWords(p.dim, p.rows)));
  queries.num_rows = static_cast<int>(p.rows);
  queries.words = words.data();
  Sums s;
  const auto n = static_cast<size_t>(p.rows * p.blocks);
  s.logit.resize(n);
  s.upper.resize(n);
  s.lower.resize(n);
  SketchMasses masses[kSketchRows];
  uint64_t seen[kSketchRows][8] = {};
  for (int64_t r = 0; r < p.rows; ++r) {
    PackSketchQuery(DType::kF32, p.queries.as<float>() + r * p.dim, p.dim, p.scale, static_cast<int>(r), &queries);
    for (int64_t b = 0; b < p.blocks; ++b) {
      const int64_t left = std::clamp<int64_t>(p.visible[static_cast<size_t>(r)] - b * kKeys, 0, kKeys);
      seen[r][b] = left == 0 ? 0 : ~uint64_t{0} >> (kKeys - left);
    }
    queries.seen[r] = seen[r];
    masses[r] = {s.logit.data() + r * p.blocks, s.upper.data() + r * p.blocks, s.lower.data() + r * p.blocks};
  }
  const SketchPasses passes = SketchPassesFor(ctx);
  passes.score(queries, blocks.data(), 0, p.blocks, {layout.step, layout.error}, masses);
  for (int64_t r = 0; r < p.rows && leveled; ++r) s.level.push_back(passes.level(masses[r], p.blocks));
  return s;
}

// Calls f(ctx) on every target.
template <class F>
void OnTargets(const F& f) {
  std::vector<std::string> targets = AvailableTargets(DType::kF32);
  targets.push_back("tiles");  // a kernel of its own on CPUs with integer dot products of bytes
  for (const std::string& target : targets) {
    SCOPED_TRACE(target);
    Context ctx(1);
    ctx.set_isa(target);
    f(ctx);
  }
}

// Returns the true sum of a block's visible keys relative to a logit.
double Truth(const Problem& p, int64_t r, int64_t block, double logit) {
  double sum = 0;
  for (int64_t j = block * kKeys; j < std::min((block + 1) * kKeys, p.visible[static_cast<size_t>(r)]); ++j) {
    sum += std::exp(p.Logit(r, j) - logit);
  }
  return sum;
}

TEST(SketchKernel, IntervalsHoldTheTruthWhateverTheSizes) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Problem p(random.Pick<int64_t>({1, 3, 4, 17, 64, 128, 1100}), random.Integer(1, 4), random.Integer(1, kSketchRows));
    p.scale = random.Pick({0.02, 0.3, -0.3, 1.0});
    p.keys.FillNormal(seed, random.Pick({0.1, 1.0, 30.0}));
    p.queries.FillNormal(seed + 100, random.Pick({0.1, 1.0, 5.0}));
    for (int64_t& v : p.visible) v = random.Integer(0, p.blocks * kKeys);
    OnTargets([&](const Context& ctx) {
      const Sums s = Scored(ctx, p, false), leveled = Scored(ctx, p, true);
      for (int64_t r = 0; r < p.rows; ++r) {
        for (int64_t b = 0; b < p.blocks; ++b) {
          const auto at = static_cast<size_t>(r * p.blocks + b);
          if (p.visible[static_cast<size_t>(r)] <= b * kKeys) {
            EXPECT_EQ(s.logit[at], -std::numeric_limits<float>::infinity());
            EXPECT_EQ(s.upper[at] + s.lower[at] + leveled.upper[at] + leveled.lower[at], 0);
            continue;
          }
          const double truth = Truth(p, r, b, static_cast<double>(s.logit[at]));
          EXPECT_GE(static_cast<double>(s.upper[at]) * (1 + kSketchError), truth);
          EXPECT_LE(static_cast<double>(s.lower[at]) * (1 - kSketchError), truth);
          const double level = static_cast<double>(leveled.level[static_cast<size_t>(r)]), same = Truth(p, r, b, level);
          EXPECT_GE(static_cast<double>(leveled.upper[at]) * (1 + kSketchError) + 0x1p-120, same);
          EXPECT_LE(static_cast<double>(leveled.lower[at]) * (1 - kSketchError), same);
        }
      }
    });
  }
}

// Every channel of every key is off by nearly half a step, towards the query or away from it.
TEST(SketchKernel, IntervalsAreReachedByKeysThatAreOffByHalfAStep) {
  for (const int sign : {1, -1}) {
    for (const bool flat : {true, false}) {  // decides which of |q|_2 e and |q|_1 step / 2 is smaller
      Problem p(16, 1, 1);
      p.scale = 1;
      for (int64_t e = 0; e < 16; ++e) p.queries.Set({0, e}, flat || e == 0 ? (e % 2 == 0 ? 0.25 : -0.25) : 0.0);
      for (int64_t j = 0; j < kKeys; ++j) {
        for (int64_t e = 0; e < 16; ++e) {
          const bool off = e != 15;
          const double direction = e % 2 == 0 ? sign : -sign;
          p.keys.Set({j, e},
                     e == 15 ? 127.0 : static_cast<double>((j + 3 * e) % 100 - 50) + (off ? 0.495 * direction : 0.0));
        }
      }
      OnTargets([&](const Context& ctx) {
        const Sums s = Scored(ctx, p, false);
        const double truth = Truth(p, 0, 0, static_cast<double>(s.logit[0]));
        const double reached = static_cast<double>(sign > 0 ? s.upper[0] : s.lower[0]) / truth;
        // The allowance for the query's own rounding is .51 127 16 steps of 2^-7 / 254.
        EXPECT_GE(sign > 0 ? reached : 1 / reached, 1 - kSketchError);
        EXPECT_LE(sign > 0 ? reached : 1 / reached, 1.15);
      });
    }
  }
}

TEST(SketchKernel, BoxesHoldTheTruthAndAreReachedByEqualKeys) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Problem p(random.Pick<int64_t>({1, 3, 16, 64, 300}), 1, 1);
    p.scale = random.Pick({0.1, -0.5, 1.0});
    const double spread = random.Pick({0.0, 0.01, 1.0});
    for (int64_t e = 0; e < p.dim; ++e) {
      const double center = 3 * random.Normal();
      p.queries.Set({0, e}, random.Normal());
      for (int64_t j = 0; j < kKeys; ++j) p.keys.Set({j, e}, center + spread * random.Normal());
    }
    const SketchBlocks layout = SketchLayout(p.dim);
    const Buffer memory(DType::kF32, {layout.block_stride / 4}, Placement::kAligned);
    auto* const block = memory.as<std::byte>();
    SketchWriter(DType::kF32, p.dim).WriteStatistics(p.keys.as<std::byte>(), p.dim * 4, block);
    std::vector<float> scaled;
    for (int64_t e = 0; e < p.dim; ++e) scaled.push_back(static_cast<float>(p.scale * p.queries.Get({0, e})));
    OnTargets([&](const Context& ctx) {
      float logit, upper, lower;
      const std::byte* const blocks[] = {block};
      SketchPassesFor(ctx).box({scaled.data(), p.dim}, blocks, 0, 1, {layout.min, layout.max, layout.mean},
                               {&logit, &upper, &lower});
      const double truth = Truth(p, 0, 0, static_cast<double>(logit));
      EXPECT_GE(static_cast<double>(upper), truth);
      EXPECT_LE(static_cast<double>(lower) * (1 - kSketchError), truth);
      if (spread == 0) {
        EXPECT_LE(static_cast<double>(upper), 1.1 * static_cast<double>(lower));
      }
    });
  }
}

// Covers a soft cap, added terms, and hidden keys between visible ones.
TEST(SketchKernel, IntervalsHoldTheTruthOfCappedLogitsWithTerms) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Problem p(random.Pick<int64_t>({1, 8, 64}), 1, 1);
    p.scale = random.Pick({0.3, -1.0});
    p.queries.FillNormal(seed, random.Pick({0.1, 1.0, 10.0}));
    const double softcap = random.Pick({0.0, 1e-3, 2.0, 50.0, 1e30}), spread = random.Pick({0.0, 0.1, 3.0});
    const double size = random.Pick({0.0, 1.0, 100.0, 1e5});
    for (int64_t e = 0; e < p.dim; ++e) {
      const double center = random.Normal();
      for (int64_t j = 0; j < kKeys; ++j) p.keys.Set({j, e}, center + spread * random.Normal());
    }
    std::vector<float> terms(kKeys);
    for (float& term : terms) term = static_cast<float>(size * random.Normal());
    const uint64_t bits = uint64_t{random.Word()} << 32 | random.Word() | 1;
    const auto truth = [&](uint64_t seen, double logit) {
      double sum = 0;
      for (int64_t j = 0; j < kKeys; ++j) {
        const double s = p.Logit(0, j), capped = softcap == 0 ? s : softcap * std::tanh(s / softcap);
        if ((seen >> j & 1) != 0) sum += std::exp(capped + static_cast<double>(terms[static_cast<size_t>(j)]) - logit);
      }
      return sum;
    };
    const SketchBlocks layout = SketchLayout(p.dim);
    const Buffer memory(DType::kF32, {layout.block_stride / 4}, Placement::kAligned);
    auto* const block = memory.as<std::byte>();
    SketchWriter writer(DType::kF32, p.dim);
    for (int64_t j = 0; j < kKeys; ++j) writer.WriteRow(p.keys.as<std::byte>() + j * p.dim * 4, j, block);
    writer.WriteStatistics(p.keys.as<std::byte>(), p.dim * 4, block);
    std::vector<float> scaled;
    for (int64_t e = 0; e < p.dim; ++e) scaled.push_back(static_cast<float>(p.scale * p.queries.Get({0, e})));
    const std::byte* const blocks[] = {block};
    OnTargets([&](const Context& ctx) {
      const os::ScopedFloatControl control;
      const auto check = [&](uint64_t seen, const auto& score) {
        float logit, upper, lower;
        score(SketchMasses{&logit, &upper, &lower});
        const double sum = truth(seen, static_cast<double>(logit));
        EXPECT_GE(static_cast<double>(upper) * (1 + kSketchError), sum);
        EXPECT_LE(static_cast<double>(lower) * (1 - kSketchError), sum);
      };
      SketchQueries queries;
      std::vector<int32_t> words(static_cast<size_t>(SketchQueries::NumWords(p.dim, 1)));
      queries.num_rows = 1;
      queries.words = words.data();
      queries.softcap = static_cast<float>(softcap);
      PackSketchQuery(DType::kF32, p.queries.as<float>(), p.dim, p.scale, 0, &queries);
      queries.seen[0] = &bits;
      queries.terms[0] = terms.data();
      check(bits, [&](const SketchMasses& m) {
        SketchPassesFor(ctx).score(queries, blocks, 0, 1, {layout.step, layout.error}, &m);
      });
      check(~uint64_t{0}, [&](const SketchMasses& m) {
        SketchPassesFor(ctx).box({scaled.data(), p.dim, terms.data(), static_cast<float>(softcap)}, blocks, 0, 1,
                                 {layout.min, layout.max, layout.mean}, m);
      });
    });
  }
}

TEST(SketchKernel, WhatIsNotFiniteIsNotKnown) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    Problem p(8, 3, 2);
    p.keys.FillNormal(1);
    p.queries.FillNormal(2);
    p.keys.Set({70, 3}, static_cast<double>(bad));
    p.visible = {192, 70};  // hidden from the second row
    OnTargets([&](const Context& ctx) {
      const Sums s = Scored(ctx, p, true);
      EXPECT_EQ(s.upper[1], kInfinity);
      EXPECT_EQ(s.lower[1], 0);
      for (const size_t at : {0, 2, 3, 4}) EXPECT_TRUE(std::isfinite(s.upper[at]) && s.lower[at] > 0);
    });
    p.queries.Set({1, 0}, static_cast<double>(bad));
    OnTargets([&](const Context& ctx) {
      const Sums s = Scored(ctx, p, true);
      for (const size_t at : {3, 4}) EXPECT_TRUE(s.upper[at] == kInfinity && s.lower[at] == 0);
      EXPECT_TRUE(std::isfinite(s.upper[0]));
    });
  }
}

TEST(SketchKernel, AScaleThatF32CannotHoldIsNotKnown) {
  Problem p(8, 1, 1);
  p.scale = 1e-43;
  p.keys.FillNormal(1, 3e37);
  p.queries.FillNormal(2, 1e5);  // with 1e5, logits are about 1
  OnTargets(
      [&](const Context& ctx) { EXPECT_EQ(Scored(ctx, p, true).upper[0], std::numeric_limits<float>::infinity()); });
}

TEST(SketchKernel, ARowDoesNotDependOnItsNeighbours) {
  Problem p(20, 3, 4);
  p.keys.FillNormal(3);
  p.queries.FillNormal(4);
  p.visible = {192, 100, 65, 190};
  OnTargets([&](const Context& ctx) {
    const Sums all = Scored(ctx, p, true);
    for (int64_t r = 0; r < 4; ++r) {
      Problem one(20, 3, 1);
      one.keys = p.keys;
      for (int64_t e = 0; e < 20; ++e) one.queries.Set({0, e}, p.queries.Get({r, e}));
      one.visible = {p.visible[static_cast<size_t>(r)]};
      const Sums alone = Scored(ctx, one, true);
      for (size_t b = 0; b < 3; ++b) {
        const size_t at = static_cast<size_t>(r) * 3 + b;
        EXPECT_EQ(alone.upper[b], all.upper[at]);
        EXPECT_EQ(alone.lower[b], all.lower[at]);
      }
    }
  });
}

}  // namespace
}  // namespace heed::softmax
