// Gradients of log decays in f32 over 8192 tokens, or 1024 where the reference takes every pair of them.
//
// With x_s = <q_s, dq_s> - <k_s, dk_s> (and whatever else a token reads and writes), the gradient of the log decay of
// token t is the sum of x_s over s >= t, and that of a decay which all tokens share is the sum of these over t. Such
// sums pass through values that are far larger than their result, so an error is measured relative to R, the largest
// intermediate value: the largest gradient in the same head over all tokens and channels or, if tokens share a decay,
// the largest of the sums over the outputs of the first n tokens. The error is at most 1e-5 R. A rounding has a
// deviation of u / sqrt(3), u = 2^-24:
//
//   - A state and its gradient are each rounded once per token, or once in four. If M tokens count and the others have
//     decayed, this is sqrt(2 M / 3) u of their product: 2e-7 with M = 20, as with decays of .05.
//   - x_s are added up over the rest of a block, at most 64 tokens, because <S, D> replaces the sum over later ones.
//   The
//     terms <q, dq> and <k, dk> leave out pairs without a decay between them, a query with the key of its token, so
//     that decays scale both as they scale R. So the error of x_s is at most some 3 u / sqrt(3) of R, and that of a sum
//     of 64 is 8 times as large: 8e-7.
//   - In a gradient that tokens share, x_s counts for all tokens before it in its block: the error is that of x_s times
//     64 / sqrt(3) and sqrt(T). R is the length of a random walk of T steps, at least sqrt(T) of them: 4e-6. These sums
//     are in f64, or they would add as much again.
//
// With RWKV's u, a query reads the previous token's write without decay, and if a token writes several times, the
// second write reads the first. States and their gradients hold such terms beside those that have been decayed by
// exp(g), and round the latter to u of the former. So errors grow by exp(-g), and the bound applies to log decays down
// to -1.
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
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed {
namespace {

constexpr double kBound = 1e-5;

bool Has(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// The gradients of log decays, and their axes.
std::map<std::string, std::string> DecayGradients(const OpEntry& op) {
  std::map<std::string, std::string> gradients;
  if (!Has(op.passes, "backward")) return gradients;
  if (Has(op.variants, "log_decay=0.05")) gradients["dlog_decay"] = "BTH";
  for (const InputSpec& input : op.inputs) {
    bool decays = input.name == "log_decay" || input.name == "A";
    if (op.recurrent != nullptr) {
      for (const mechanism::Row& row : op.recurrent->of_problems.tensors) {
        decays |= row.name == input.name && (row.values == mechanism::kDecays || row.values == mechanism::kOpenGates);
      }
    }
    if (decays) gradients["d" + input.name] = input.axes;
  }
  return gradients;
}

struct Problem {
  const OpEntry& op;
  std::string variant;
  int64_t tokens() const { return op.name == "wall_attention" || op.name == "log_linear_attention" ? 1024 : 8192; }
};
void PrintTo(const Problem& p, std::ostream* os) { *os << p.op.name << " " << p.variant; }

// Problems of every mechanism with such gradients, with decays of ordinary strength and strong ones.
std::vector<Problem> Problems() {
  std::vector<Problem> problems;
  for (const OpEntry& op : AllOps()) {
    if (DecayGradients(op).empty()) continue;
    if (Has(op.variants, "log_decay=0.05")) {  // within a window, as its reference takes every pair
      for (const char* decays : {"log_decay=0.05", "log_decay=5"}) {
        problems.push_back({op, std::string("window=256+") + decays});
      }
      continue;
    }
    problems.push_back({op, ""});
    if (!Has(op.variants, "strong")) continue;
    if (DecayGradients(op).contains("dA")) {  // rates, which steps multiply: those are strong here and there
      problems.push_back({op, "strong"});
      continue;
    }
    const bool undecayed = op.recurrent != nullptr && (op.recurrent->definition.table.Has(mechanism::Role::kBonus) ||
                                                       op.recurrent->definition.several_writes());
    problems.push_back({op, undecayed ? "strong=1" : "strong=5"});
  }
  return problems;
}

struct Results {
  std::vector<Buffer> memory;
  std::vector<TensorView> views;

  Results(const Case& c, bool exact) {
    for (const OutputSpec& spec : c.outputs) {
      memory.emplace_back(exact ? DType::kF64 : spec.dtype, spec.sizes, Placement::kAligned);
      views.push_back(memory.back().view());
    }
  }
  static Results Expected(const Case& c) {
    Results results(c, true);
    c.reference(results.views, {});
    return results;
  }
};

class DecayGradientsOf : public testing::TestWithParam<Problem> {
 protected:
  static Case Make(const std::string& lengths = "") {
    const auto& [op, variant] = GetParam();
    const int64_t T = GetParam().tokens();
    const std::string separator = variant.empty() || lengths.empty() ? "" : "+";
    return op.make_case(
        {.sizes = {1, T, T, 1, 1, 16, 16}, .pass = "backward", .variant = variant + separator + lengths});
  }
};

TEST_P(DecayGradientsOf, AreWithinTheirBoundOverManyTokens) {
  const OpEntry& op = GetParam().op;
  const Case c = Make();
  const Results expected = Results::Expected(c);
  const std::map<std::string, std::string> gradients = DecayGradients(op);
  const bool shared = std::any_of(gradients.begin(), gradients.end(),
                                  [](const auto& gradient) { return gradient.second.find('T') == std::string::npos; });
  std::vector<Results> prefixes;  // sums over fewer tokens
  for (const char* lengths : {"lengths=13", "lengths=38", "lengths=62", "lengths=87"}) {
    if (shared && Has(op.variants, "lengths=62")) prefixes.push_back(Results::Expected(Make(lengths)));
  }
  Context ctx(1);
  for (const std::string& target : AvailableTargets(DType::kF32)) {
    ctx.set_isa(target);
    const Results results(c, false);
    c.run(ctx, results.views);
    for (size_t output = 0; output < c.outputs.size(); ++output) {
      const auto gradient = gradients.find(c.outputs[output].name);
      if (gradient == gradients.end()) continue;
      const std::string& axes = gradient->second;
      const std::vector<int64_t>& sizes = c.outputs[output].sizes;
      ASSERT_EQ(sizes.size(), axes.size()) << axes;
      std::map<int64_t, std::pair<double, double>> heads;  // R and the largest error; of channels that are heads too
      std::vector<int64_t> at(sizes.size());
      do {
        int64_t head = 0;
        for (size_t axis = 0; axis < at.size(); ++axis) {
          if (std::string("HGDC").find(axes[axis]) != std::string::npos) head = at[axis];
        }
        auto& [largest, error] = heads[head];
        const double exact = GetElement(expected.views[output], at);
        largest = std::max(largest, std::abs(exact));
        for (const Results& prefix : prefixes) {
          largest = std::max(largest, std::abs(GetElement(prefix.views[output], at)));
        }
        error = std::max(error, std::abs(GetElement(results.views[output], at) - exact));
      } while (NextIndex(sizes, at));
      double worst = 0;
      for (const auto& [head, found] : heads) worst = std::max(worst, found.second / found.first);
      EXPECT_LE(worst, kBound) << target << " " << gradient->first;
      std::printf("%s %s: %.2g R of %.2g R\n", target.c_str(), gradient->first.c_str(), worst, kBound);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllMechanisms, DecayGradientsOf, testing::ValuesIn(Problems()), [](const auto& test) {
  std::string name = test.param.op.name + "_" + test.param.variant;
  std::replace_if(name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
});

}  // namespace
}  // namespace heed
