// Candidates: their plans match their runs, and they compute attention with dropped keys, or the mechanism.
#include "heed/advise/candidate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "heed/advise/candidates_internal.h"
#include "heed/advise/numbers_internal.h"
#include "heed/core/error.h"
#include "heed/harness/assumed_tensors.h"
#include "heed/harness/output_error.h"

namespace heed::advise {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Ge;
using testing::HasSubstr;
using testing::Le;

const std::vector<InputSpec> kQkv = {{"q", "BTHK"}, {"k", "BTGK"}, {"v", "BTGV"}};

constexpr Sizes kSizes = {2, 160, 160, 4, 2, 16, 24};

Question QuestionOf(Purpose purpose, bool causal = true) {
  Question question;
  question.purpose = purpose;
  question.exact.causal = causal;
  question.sizes = kSizes;
  question.dtypes = {DType::kF32};
  question.threads = 2;
  return question;
}

// Softmax attention from its definition, in double, over the pairs that `keep` keeps.
Buffer Attention(const TensorMap& tensors, const std::function<bool(int64_t i, int64_t j)>& keep) {
  const ConstTensorView &q = tensors.at("q"), &k = tensors.at("k"), &v = tensors.at("v");
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), D = q.size(3), Dv = v.size(3), group = H / k.size(2);
  const Buffer o(DType::kF64, {B, T, H, Dv}, Placement::kAligned);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t i = 0; i < T; ++i) {
        double sum = 0;
        std::vector<double> mean(static_cast<size_t>(Dv), 0.0);
        for (int64_t j = 0; j < T; ++j) {
          if (!keep(i, j)) continue;
          double dot = 0;
          for (int64_t d = 0; d < D; ++d)
            dot += GetElement(q, std::vector{b, i, h, d}) * GetElement(k, std::vector{b, j, h / group, d});
          const double weight = std::exp(dot / std::sqrt(static_cast<double>(D)));
          sum += weight;
          for (int64_t d = 0; d < Dv; ++d)
            mean[static_cast<size_t>(d)] += weight * GetElement(v, std::vector{b, j, h / group, d});
        }
        for (int64_t d = 0; d < Dv; ++d) o.Set({b, i, h, d}, sum == 0 ? 0 : mean[static_cast<size_t>(d)] / sum);
      }
    }
  }
  return o;
}

// Runs a candidate on these tensors.
Call Ran(const Candidate& candidate, Context& ctx, const TensorMap& tensors) {
  Call call = candidate.On(ctx, tensors);
  if (call.compute) call.compute(ctx);
  for (const auto& stage : call.stages) stage(ctx);
  return call;
}

const Candidate& Find(const Candidates& candidates, const std::string& options) {
  for (const auto& candidate : candidates) {
    if (candidate->options == options) return *candidate;
  }
  throw InternalError("no candidate " + options);
}

class CandidateTest : public testing::Test {
 protected:
  CandidateTest() : numbers_(kSizes, DType::kF32), tensors_(numbers_.For(kQkv)) {}

  // Error of the last tokens, or of all.
  double ErrorOf(const Candidate& candidate, const Buffer& expected) {
    const Call call = Ran(candidate, ctx_, tensors_);
    const int64_t rows = call.o.size(1), T = expected.view().size(1);
    OutputErrorSum sum;
    for (int64_t b = 0; b < kSizes.B; ++b) {
      const Buffer last = expected.As(expected.view().Slice(0, b, b + 1).Slice(1, T - rows, T));
      const Buffer got(DType::kF64, last.view().sizes(), Placement::kAligned);
      const std::vector<double> values = Elements(call.o.Slice(0, b, b + 1));
      std::ranges::copy(values, got.as<double>());
      sum.Add(got.view(), last.view());
    }
    return sum.Result().relative;
  }

  Context ctx_{2};
  Numbers numbers_;
  TensorMap tensors_;
};

TEST_F(CandidateTest, ExactAttentionAndItsWindowsAreWhatTheySay) {
  const Candidates candidates = AttentionCandidates(QuestionOf(Purpose::kPrefill));
  EXPECT_LT(ErrorOf(Find(candidates, "causal"), Attention(tensors_, [](int64_t i, int64_t j) { return j <= i; })),
            1e-6);
  EXPECT_LT(
      ErrorOf(Find(candidates, "causal, one thread"), Attention(tensors_, [](int64_t i, int64_t j) { return j <= i; })),
      1e-6);
  for (const int64_t width : {80, 32, 16}) {
    const Buffer expected = Attention(tensors_, [&](int64_t i, int64_t j) { return j <= i && j > i - width; });
    EXPECT_LT(ErrorOf(Find(candidates, "causal window " + std::to_string(width - 1) + ",0"), expected), 1e-6) << width;
  }
  const Candidates full = AttentionCandidates(QuestionOf(Purpose::kPrefill, false));
  const Buffer expected = Attention(tensors_, [](int64_t i, int64_t j) { return std::abs(i - j) <= 16; });
  EXPECT_LT(ErrorOf(Find(full, "window 16,16"), expected), 1e-6);
}

TEST_F(CandidateTest, CachesDecodeTheLastTokens) {
  const Candidates candidates = AttentionCandidates(QuestionOf(Purpose::kDecode));
  const Buffer exact = Attention(tensors_, [](int64_t i, int64_t j) { return j <= i; });
  EXPECT_LT(ErrorOf(Find(candidates, "cache"), exact), 1e-6);
  const double int8_error = ErrorOf(Find(candidates, "int8 cache"), exact);
  EXPECT_THAT(int8_error, AllOf(Ge(1e-4), Le(2e-2)));
  const Buffer near = Attention(tensors_, [](int64_t i, int64_t j) { return j <= i && j > i - 32; });
  EXPECT_LT(ErrorOf(Find(candidates, "ring, window 32"), near), 1e-6);
  EXPECT_LT(ErrorOf(Find(candidates, "epsilon 0.02 sketch"), exact), 0.05);
  EXPECT_LT(ErrorOf(Find(candidates, "epsilon 0.02 skip"), exact), 0.05);
}

TEST_F(CandidateTest, StagesCanRunAgainAndAgain) {
  for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining, Purpose::kDecode}) {
    for (const auto& candidate : AttentionCandidates(QuestionOf(purpose))) {
      const Call call = Ran(*candidate, ctx_, tensors_);
      const Buffer before(call.o.dtype(), call.o.sizes(), Placement::kAligned);
      std::ranges::copy(Elements(call.o), before.as<float>());
      for (int again = 0; again < 3; ++again) {
        for (const auto& stage : call.stages) stage(ctx_);
      }
      EXPECT_TRUE(SameBits(before.view(), call.o))
          << candidate->mechanism << " " << candidate->options << " " << Name(purpose);
    }
  }
}

TEST_F(CandidateTest, PartsAreAsManyAsStages) {
  for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining, Purpose::kDecode}) {
    for (const auto& candidate : AttentionCandidates(QuestionOf(purpose))) {
      const Call call = Ran(*candidate, ctx_, tensors_);
      const std::vector<Part> parts = candidate->Parts(ctx_, kSizes, call.kept());
      ASSERT_EQ(parts.size(), call.stages.size()) << candidate->options;
      for (const Part& part : parts) {
        EXPECT_EQ(part.work.dtype, DType::kF32);
        EXPECT_EQ(part.work.threads, candidate->threads);
        for (const auto& [unit, amount] : part.load) EXPECT_TRUE(amount >= 0 && std::isfinite(amount)) << unit;
      }
      const double kept = call.kept();
      EXPECT_THAT(kept, AllOf(Ge(0), Le(candidate->is_causal ? 2.1 : 1.0)))
          << candidate->options;  // tiles on the diagonal
    }
  }
}

TEST_F(CandidateTest, TheShareThatTopBlocksKeepIsKnownBeforehand) {
  constexpr Sizes kLonger = {1, 1000, 1000, 2, 1, 16, 16};
  Numbers numbers(kLonger, DType::kF32);
  const TensorMap tensors = numbers.For(kQkv);
  for (const bool causal : {true, false}) {
    Question question = QuestionOf(Purpose::kPrefill, causal);
    question.sizes = kLonger;
    const Candidates candidates = AttentionCandidates(question);
    for (const char* options : {"top_blocks(7, 64, mean)", "top_blocks(3, 64, mean)", "top_blocks(3, 64, box)"}) {
      const Candidate& candidate = Find(candidates, (causal ? "causal " : "") + std::string(options));
      const double observed = Ran(candidate, ctx_, tensors).kept();
      EXPECT_NEAR(candidate.KeptOf(1000) / observed, 1, 0.03) << candidate.options;
      // Twice the tokens with as many blocks per row, so about half the fraction.
      EXPECT_NEAR(candidate.KeptAt(observed, 1000, 32000) / candidate.KeptAt(observed, 1000, 64000), 2, 0.05)
          << candidate.options;
      EXPECT_DOUBLE_EQ(candidate.KeptAt(observed, 1000, 1000), observed);
    }
  }
}

TEST_F(CandidateTest, LoadsOfDenseAttentionAreItsPairsAndProducts) {
  Question question = QuestionOf(Purpose::kPrefill, false);
  const Candidates candidates = AttentionCandidates(question);
  const Load load = Find(candidates, "full").Parts(ctx_, kSizes, 1)[0].load;
  EXPECT_DOUBLE_EQ(load.at("row"), 2 * 4 * 160);
  EXPECT_DOUBLE_EQ(load.at("pair"), 2 * 4 * 160 * 160);
  EXPECT_DOUBLE_EQ(load.at("flop"), 2.0 * 2 * 4 * 160 * 160 * (16 + 24));
  EXPECT_DOUBLE_EQ(load.at("byte"), 4.0 * 2 * 160 * (4 * 16 + 2 * 16 + 2 * 24 + 4 * 24));
}

TEST_F(CandidateTest, MemoryOfCachesIsThatOfTheirPages) {
  for (const auto& candidate : AttentionCandidates(QuestionOf(Purpose::kDecode))) {
    Sizes longer = kSizes;
    longer.Tq = longer.Tk = 6400;
    const Memory memory = candidate->MemoryAt(ctx_, longer, 1);
    const double rows = 2.0 * 6400 * 2 * (16 + 24);  // elements of keys and values
    const bool rings = candidate->options.starts_with("ring");
    const double least = candidate->options == "int8 cache" ? rows : rings ? 0 : 4 * rows;
    EXPECT_GE(memory.state, least) << candidate->options;
    // A block of the cache has the size for the larger of keys and values, and a sketch has D + 8 bytes per key.
    EXPECT_LE(memory.state, 2.2 * (rings ? 4 * rows / 50 : 4 * rows)) << candidate->options;
    EXPECT_DOUBLE_EQ(memory.arguments, 4.0 * 2 * 4 * (16 + 24)) << candidate->options;
  }
}

TEST_F(CandidateTest, RestrictedCallsGetNoFurtherRestrictions) {
  Question question = QuestionOf(Purpose::kPrefill);
  question.exact.window = {31, 0};
  question.threads = 1;
  const Candidates candidates = AttentionCandidates(question);
  ASSERT_EQ(candidates.size(), 1u);
  EXPECT_EQ(candidates[0]->options, "causal window 31,0");
  EXPECT_EQ(candidates[0]->python, "heed.attention(q, k, v, causal=True, window=(31, 0))");
  question.purpose = Purpose::kDecode;
  const Candidates decoding = AttentionCandidates(question);
  ASSERT_EQ(decoding.size(), 1u);
  EXPECT_EQ(decoding[0]->options, "ring, window 32");
}

TEST_F(CandidateTest, WithoutTensorsNothingIsThereWhoseChoiceDependsOnThem) {
  for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining, Purpose::kDecode}) {
    Question question = QuestionOf(purpose);
    question.has_tensors = false;
    for (const auto& candidate : AttentionCandidates(question)) EXPECT_FALSE(candidate->chooses) << candidate->options;
  }
}

// Candidates of other mechanisms, from the functions of their entries.

struct Entry {
  OpEntry op;
  friend void PrintTo(const Entry& entry, std::ostream* os) { *os << entry.op.name; }
};

std::vector<Entry> Entries() {
  std::vector<Entry> entries;
  for (const OpEntry& op : AllOps()) {
    if (op.call && TakesQkv(op) && Numbers::Know(op.inputs)) entries.push_back({op});
  }
  return entries;
}

// q, k and v with equal numbers of heads, and of channels where a mechanism takes no others.
Sizes SizesFor(const OpEntry& op) {
  Sizes sizes = {2, 70, 70, 2, 2, 12, 10};
  try {
    Numbers numbers(sizes, DType::kF32);
    op.call(Context(1), numbers.For(op.inputs), {});
  } catch (const InvalidArgument&) {
    sizes.Dv = sizes.D;
  }
  return sizes;
}

class Mechanisms : public testing::TestWithParam<Entry> {
 protected:
  const Sizes sizes_ = SizesFor(GetParam().op);

  TensorMap TensorsOf(Numbers& numbers) const { return numbers.For(GetParam().op.inputs); }

  std::vector<Buffer> Run(const TensorCall& call) {
    std::vector<Buffer> outputs;
    std::vector<TensorView> views;
    for (const OutputSpec& spec : call.outputs) {
      outputs.emplace_back(spec.dtype, spec.sizes, Placement::kAligned);
      views.push_back(outputs.back().view());
    }
    call.run(ctx_, views);
    return outputs;
  }

  Context ctx_{2};
};

TEST_P(Mechanisms, GradientsOfATrainingCallAreSlopesOfItsOutput) {
  const OpEntry& op = GetParam().op;
  if (!op.train) {
    EXPECT_EQ(op.name, "certified_attention");  // the only one without a backward pass
    return;
  }
  Numbers numbers(sizes_, DType::kF64);
  TensorMap tensors = TensorsOf(numbers);
  const TensorCall plain = op.call(ctx_, tensors, {});
  const Buffer d_o = OrdinaryNumbers(DType::kF64, plain.outputs[0].sizes, 77);
  TensorMap with = tensors;
  with["d_o"] = d_o.view();
  const TensorCall both = op.train(ctx_, with, {});
  const std::vector<Buffer> results = Run(both);
  EXPECT_TRUE(SameBits(results[0].view(), Run(plain)[0].view()));
  EXPECT_GE(both.workspace_bytes, plain.workspace_bytes);
  const auto loss = [&](const TensorMap& at) {
    const std::vector<Buffer> outputs = Run(op.call(ctx_, at, {}));
    double sum = 0;
    for (int64_t i = 0; i < d_o.view().num_elements(); ++i) sum += d_o.as<double>()[i] * outputs[0].as<double>()[i];
    return sum;
  };
  for (const char* name : {"q", "k", "v"}) {
    if (!tensors.contains(name)) continue;
    const auto gradient = std::ranges::find(both.outputs, std::string("d") + name, &OutputSpec::name);
    ASSERT_NE(gradient, both.outputs.end()) << name;
    const Buffer& of = results[static_cast<size_t>(gradient - both.outputs.begin())];
    const ConstTensorView& x = tensors.at(name);
    const Buffer direction = OrdinaryNumbers(DType::kF64, x.sizes(), 5);
    double slope = 0;
    for (int64_t i = 0; i < x.num_elements(); ++i) slope += of.as<double>()[i] * direction.as<double>()[i];
    constexpr double kStep = 1e-5;
    double sides[2];
    for (const int side : {0, 1}) {
      const Buffer moved(DType::kF64, x.sizes(), Placement::kAligned);
      for (int64_t i = 0; i < x.num_elements(); ++i) {
        moved.as<double>()[i] = x.as<double>()[i] + (side == 0 ? -kStep : kStep) * direction.as<double>()[i];
      }
      TensorMap at = tensors;
      at[name] = moved.view();
      sides[side] = loss(at);
    }
    EXPECT_NEAR((sides[1] - sides[0]) / (2 * kStep), slope, 1e-4 * (1 + std::abs(slope))) << name;
  }
}

TEST_P(Mechanisms, AStepBehindTheStateOfAPassIsTheNextTokenOfTheWhole) {
  const OpEntry& op = GetParam().op;
  Question question;
  question.purpose = Purpose::kDecode;
  question.sizes = sizes_;
  const auto candidate = MechanismCandidate(question, op, {}, DType::kF64);
  Numbers numbers(sizes_, DType::kF64);
  const TensorMap tensors = TensorsOf(numbers);
  if (candidate == nullptr) {
    EXPECT_EQ(op.step, nullptr);
    return;
  }
  const TensorCall whole = op.call(ctx_, tensors, {});
  if (!whole.causal) {
    EXPECT_THROW(candidate->On(ctx_, tensors), InvalidArgument);
    return;
  }
  const Buffer expected = Run(whole)[0];
  const Call call = Ran(*candidate, ctx_, tensors);
  const int64_t rows = call.o.size(1), T = sizes_.Tq;
  ASSERT_EQ(rows, 16);
  for (int64_t b = 0; b < sizes_.B; ++b) {
    const std::vector<double> got = Elements(call.o.Slice(0, b, b + 1));
    const std::vector<double> wanted = Elements(expected.view().Slice(0, b, b + 1).Slice(1, T - rows, T));
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 1e-10 * (1 + std::abs(wanted[i]))) << i;
  }
}

TEST_P(Mechanisms, WhatIsPlannedWithoutTensorsIsWhatIsRun) {
  const OpEntry& op = GetParam().op;
  Numbers numbers(sizes_, DType::kF32);
  const TensorMap tensors = TensorsOf(numbers);
  for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining}) {
    Question question;
    question.purpose = purpose;
    question.sizes = sizes_;
    const auto candidate = MechanismCandidate(question, op, {}, DType::kF32);
    if (candidate == nullptr) continue;
    TensorMap with = tensors;
    const Buffer d_o = OrdinaryNumbers(DType::kF32, std::vector<int64_t>{2, 70, 2, sizes_.Dv});
    if (purpose == Purpose::kTraining) with["d_o"] = d_o.view();
    const TensorCall call = (purpose == Purpose::kPrefill ? op.call : op.train)(ctx_, with, {});
    const Memory memory = candidate->MemoryAt(ctx_, sizes_, 1);
    double bytes = 0;
    for (const auto& [name, x] : with)
      bytes += static_cast<double>(x.num_elements()) * static_cast<double>(SizeOf(x.dtype()));
    double states = 0;
    for (const OutputSpec& spec : call.outputs) {
      double size = static_cast<double>(SizeOf(spec.dtype));
      for (const int64_t n : spec.sizes) size *= static_cast<double>(n);
      (spec.name.starts_with("state") ? states : bytes) += size;
    }
    EXPECT_DOUBLE_EQ(memory.arguments, bytes);
    EXPECT_DOUBLE_EQ(memory.workspace, static_cast<double>(call.workspace_bytes));
    if (states > 0) {
      EXPECT_DOUBLE_EQ(memory.state, states);
    }
    const Load load = candidate->Parts(ctx_, sizes_, 1)[0].load;
    EXPECT_DOUBLE_EQ(load.at("flop"), call.flops);
    EXPECT_DOUBLE_EQ(load.at("byte"), bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Mechanisms, testing::ValuesIn(Entries()),
                         [](const auto& value) { return value.param.op.name; });

TEST(MechanismsTest, ThereAreMany) { EXPECT_GE(Entries().size(), 30u); }

}  // namespace
}  // namespace heed::advise
