// Gradients of log decays of f32, 8192 tokens long.
//
// Such a gradient is a partial sum: with x_s = q_s . dq_s - k_s . dk_s (and what else reads or writes), the gradient of
// the log decay of token t is the sum of x_s over s >= t, and one that all tokens share is the sum of these. Sums may
// pass through values that are far larger than what they come to, so an error is measured by the largest value on the
// way, R: the largest gradient of the same head and channel over all tokens or, where tokens share a decay, the largest
// of the sums over the first n tokens. It is at most 1e-5 R:
//
//   - A state is rounded to u = 2^-24 of itself once for every token, or every four, with deviation u / sqrt(3), and so
//     is its gradient: over T = 8192 tokens that all count, sqrt(2 T / 3) u = 4.4e-6, or 2.2e-6 with four; the largest
//     of some thousand errors is 3.5 deviations: .8e-5 for recurrences that forget nothing. (Delta rules round once per
//     token, but their keys are unit vectors: a write erases what was there, and few tokens count.)
//   - x_s is added up over 64 tokens at most, as <S, D> stands for what comes later. The pair of a token's own query
//     and key, which no decay reaches, is left out of both products; what remains are pairs that the decays of tokens
//     between them scale, as they scale R. So each x_s has an error of a few u of some R, and 64 of them 64 / sqrt(3) u
//     times that in a gradient that tokens share, as each counts for all tokens of its block before it: 2.2e-6 to 4.4e-6
//     in deviations of a sum over tokens, R of which are 1 or more.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/case.h"
#include "heed/ops/mechanism/recurrent_case.h"

namespace heed {
namespace {

constexpr int64_t kTokens = 8192;
constexpr double kBound = 1e-5;

bool Knows(const OpEntry& op, const std::string& word) {
  return std::find(op.variants.begin(), op.variants.end(), word) != op.variants.end();
}

// The gradients of log decays, and their axes.
std::map<std::string, std::string> DecayGradients(const OpEntry& op) {
  std::map<std::string, std::string> gradients;
  if (Knows(op, "log_decay=0.05")) gradients["dlog_decay"] = "BTH";
  for (const InputSpec& input : op.inputs) {
    bool decays = input.name == "log_decay" || input.name == "A";
    for (size_t i = 0; op.recurrent != nullptr && i < op.recurrent->of_problems.tensors.size(); ++i) {
      const mechanism::Row& row = op.recurrent->of_problems.tensors[i];
      decays |= row.name == input.name && (row.values == mechanism::kDecays || row.values == mechanism::kOpenGates);
    }
    if (decays) gradients["d" + input.name] = input.axes;
  }
  return gradients;
}

struct Problem {
  const OpEntry& op;
  std::string variant;
};
void PrintTo(const Problem& p, std::ostream* os) { *os << p.op.name << " " << p.variant; }

// Every mechanism that has gradients of decays, with decays of every strength that it knows.
std::vector<Problem> Problems() {
  std::vector<Problem> problems;
  for (const OpEntry& op : AllOps()) {
    if (!Knows({.variants = op.passes}, "backward") || DecayGradients(op).empty()) continue;
    if (Knows(op, "log_decay=0.05")) {
      for (const char* variant : {"log_decay=0.05", "log_decay=5"}) problems.push_back({op, variant});
      continue;
    }
    problems.push_back({op, ""});
    for (const char* word : {"vanishing", "strong"}) {
      if (Knows(op, word)) problems.push_back({op, word});
    }
    if (Knows(op, "strong")) {
      for (const char* variant : {"strong=1", "strong=2", "strong=5"}) problems.push_back({op, variant});
    }
  }
  return problems;
}

struct Results {
  std::vector<Buffer> buffers;
  std::vector<TensorView> views;

  Results(const Case& c, bool exact) {
    for (const OutputSpec& spec : c.outputs) {
      buffers.emplace_back(exact ? DType::kF64 : spec.dtype, spec.sizes, Placement::kAligned);
      views.push_back(buffers.back().view());
    }
  }
};

class DecayGradientsOf : public testing::TestWithParam<Problem> {
 protected:
  static Case Make(const std::string& more) {
    const auto& [op, variant] = GetParam();
    const bool exact = op.family == "exact";
    const Sizes sizes = exact ? Sizes{1, kTokens, kTokens, 1, 1, 8, 8} : Sizes{1, kTokens, kTokens, 2, 1, 16, 16};
    const std::string words = variant + (variant.empty() || more.empty() ? "" : "+") + more;
    return op.make_case({sizes, DType::kF32, 1, "backward", words});
  }
};

TEST_P(DecayGradientsOf, AreWithinTheirBoundOverManyTokens) {
  const OpEntry& op = GetParam().op;
  const Case c = Make("");
  const Results expected(c, true);
  c.reference(expected.views, {});
  std::vector<Results> prefixes;  // of sums over fewer tokens
  for (const char* lengths : {"lengths=13", "lengths=38", "lengths=62", "lengths=87"}) {
    if (!Knows(op, "lengths=62") || op.family == "exact") continue;
    const Case shorter = Make(lengths);
    prefixes.emplace_back(shorter, true);
    shorter.reference(prefixes.back().views, {});
  }
  for (const std::string& target : AvailableTargets(DType::kF32)) {
    Context ctx(1);
    ctx.set_isa(target);
    const Results results(c, false);
    c.run(ctx, results.views);
    for (const auto& [name, axes] : DecayGradients(op)) {
      const auto spec = std::find_if(c.outputs.begin(), c.outputs.end(), [&](const auto& s) { return s.name == name; });
      if (spec == c.outputs.end()) continue;
      ASSERT_EQ(spec->sizes.size(), axes.size()) << axes;
      const auto output = static_cast<size_t>(spec - c.outputs.begin());
      const TensorView &want = expected.views[output], &got = results.views[output];
      // R and the largest error of each head.
      std::map<std::vector<int64_t>, std::pair<double, double>> heads;
      std::vector<int64_t> at(spec->sizes.size());
      do {
        std::vector<int64_t> head;
        for (size_t axis = 0; axis < at.size(); ++axis) {
          if (axes[axis] == 'B' || axes[axis] == 'H' || axes[axis] == 'D' || axes[axis] == 'C') head.push_back(at[axis]);
        }
        auto& [largest, error] = heads[head];
        const double exact = GetElement(want, at);
        largest = std::max(largest, std::abs(exact));
        for (const Results& prefix : prefixes) {
          if (axes.find('T') == std::string::npos) {
            largest = std::max(largest, std::abs(GetElement(prefix.views[output], at)));
          }
        }
        error = std::max(error, std::abs(GetElement(got, at) - exact));
      } while (NextIndex(spec->sizes, at));
      double worst = 0;
      for (const auto& [head, found] : heads) worst = std::max(worst, found.second / found.first);
      EXPECT_LE(worst, kBound) << target << " " << name;
      std::printf("%s %s %s: %.2g of %.2g\n", target.c_str(), name.c_str(), GetParam().variant.c_str(), worst, kBound);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllMechanisms, DecayGradientsOf, testing::ValuesIn(Problems()), [](const auto& test) {
  std::string name = test.param.op.name + "_" + test.param.variant;
  std::replace_if(name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
  return name;
});

}  // namespace
}  // namespace heed
