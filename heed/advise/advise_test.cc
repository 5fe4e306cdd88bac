// The adviser as a whole: the candidates it runs, its predictions with an artificial model, and those it leaves out or
// refuses.
#include "heed/advise/advise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"

namespace heed::advise {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::Field;
using testing::HasSubstr;
using testing::Key;
using testing::Not;
using testing::Pair;
using testing::ThrowsMessage;

constexpr int64_t kTokens = 512;

// q, k and v of one layer; tests may add other tensors.
class AdviseTest : public testing::Test {
 protected:
  AdviseTest() {
    Add("q", {1, kTokens, 2, 8});
    Add("k", {1, kTokens, 2, 8});
    Add("v", {1, kTokens, 2, 8});
    request_.exact.causal = true;
    request_.threads = 1;
    request_.seconds = 0.2;
    request_.source = [this](std::span<const InputSpec> inputs, std::optional<int64_t> tokens) {
      return NamedOf("file", given_, inputs, {.layer = "", .heads = "", .dtype = {}, .tokens = tokens});
    };
    request_.dtypes = {DType::kF32};
  }

  void Add(const std::string& name, const std::vector<int64_t>& sizes, DType dtype = DType::kF32) {
    memory_.push_back(OrdinaryNumbers(dtype, sizes, memory_.size() + 1));
    given_[name] = memory_.back().view();
  }

  // Sets the same price per call for every kind of work, except those named.
  void Price(double seconds, const std::map<std::string, double>& others) {
    for (const auto& [name, each] : others) prices_.emplace(name, each);
    for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining, Purpose::kDecode}) {
      std::set<std::string> works;
      Question question;
      question.purpose = purpose;
      question.exact.causal = true;
      question.sizes = {1, kTokens, kTokens, 2, 2, 8, 8};
      Context ctx(1);
      for (const auto& candidate : AttentionCandidates(question)) {
        for (const Part& part : candidate->Parts(ctx, question.sizes, 1)) works.insert(part.work.name);
      }
      for (const OpEntry& op : AllOps()) works.insert(op.name + " " + Name(purpose));
      for (const std::string& work : works) {
        model_.fits[{work, DType::kF32, 1}] = {{"call", prices_.contains(work) ? prices_.at(work) : seconds}};
      }
    }
    request_.model = &model_;
  }

  static const Row* Find(const Advice& advice, const std::string& mechanism, const std::string& options = "") {
    for (const Row& row : advice.rows) {
      if (row.mechanism == mechanism && (options.empty() || row.options == options)) return &row;
    }
    return nullptr;
  }

  std::vector<Buffer> memory_;
  TensorMap given_;
  Request request_;
  CostModel model_;
  std::map<std::string, double> prices_;
};

TEST_F(AdviseTest, WithoutAModelMeasuredTimesAreRanked) {
  const Advice advice = Advise(request_);
  EXPECT_EQ(advice.length, kTokens);
  EXPECT_EQ(advice.sample_tokens, kTokens);
  ASSERT_GT(advice.rows.size(), 10u);
  double before = 0;
  for (const Row& row : advice.rows) {
    EXPECT_TRUE(std::isnan(row.predicted_seconds));
    EXPECT_EQ(row.seconds, row.measured_seconds);
    EXPECT_GE(row.seconds, before);
    before = row.seconds;
    EXPECT_GT(row.memory_bytes(), 0);
    EXPECT_FALSE(row.reason.empty());
  }
  EXPECT_LT(Find(advice, "attention", "causal")->error.relative, 1e-6);
  EXPECT_GT(Find(advice, "retention")->error.relative, 0.1);
  EXPECT_TRUE(Find(advice, "attention")->is_softmax);
  EXPECT_FALSE(Find(advice, "retention")->is_softmax);
  EXPECT_TRUE(Find(advice, "retention")->is_causal);
  EXPECT_FALSE(Find(advice, "linformer")->is_causal);
}

TEST_F(AdviseTest, AtAnotherLengthPredictionsAreRanked) {
  Price(1, {{"retention prefill", 0.25}, {"attention prefill", 0.5}});
  request_.length = 5000;
  const Advice advice = Advise(request_);
  EXPECT_EQ(advice.rows[0].mechanism, "retention");
  EXPECT_EQ(advice.rows[0].seconds, 0.25);
  EXPECT_EQ(advice.rows[0].predicted_seconds, 0.25);
  EXPECT_EQ(advice.rows[1].mechanism, "attention");
  EXPECT_EQ(advice.sizes.Tk, 5000);
  EXPECT_EQ(advice.sample_tokens, kTokens);
  // A selection, and attention with it: two parts.
  EXPECT_EQ(Find(advice, "attention", "causal top_blocks(4, 64, mean)")->predicted_seconds, 2);
}

TEST_F(AdviseTest, AnErrorBudgetKeepsWhatIsClose) {
  Price(1, {{"retention prefill", 0.25}});
  request_.length = 5000;
  request_.budget.relative_error = 1e-5;
  const Advice advice = Advise(request_);
  EXPECT_EQ(advice.rows[0].mechanism, "attention");
  EXPECT_EQ(advice.rows[0].options, "causal");
  const Row* other = Find(advice, "retention");
  EXPECT_FALSE(other->within);
  EXPECT_THAT(other->reason, AllOf(HasSubstr("times the budget"), HasSubstr("another function")));
}

TEST_F(AdviseTest, MemoryGrowsWithTheRequestedLength) {
  Price(1, {});
  request_.length = kTokens;
  const Advice brief = Advise(request_);
  request_.length = 10 * kTokens;
  const Advice lengthy = Advise(request_);
  EXPECT_DOUBLE_EQ(Find(brief, "attention", "causal")->memory.arguments, 4.0 * kTokens * 2 * 8 * 4);
  EXPECT_DOUBLE_EQ(Find(lengthy, "attention", "causal")->memory.arguments, 10 * 4.0 * kTokens * 2 * 8 * 4);
  EXPECT_EQ(Find(lengthy, "retention")->memory.state, Find(brief, "retention")->memory.state);
}

TEST_F(AdviseTest, DecodingComparesTheLastTokensAndKnowsStates) {
  request_.purpose = Purpose::kDecode;
  request_.exact.causal = false;  // causal or not makes no difference here
  const Advice advice = Advise(request_);
  EXPECT_LT(Find(advice, "attention", "cache")->error.relative, 1e-6);
  EXPECT_EQ(Find(advice, "retention")->memory.state, 2 * 8 * 8 * 4);
  EXPECT_GE(Find(advice, "attention", "cache")->memory.state, 2 * kTokens * 2 * 8 * 4);
  EXPECT_EQ(Find(advice, "linformer"), nullptr);
}

TEST_F(AdviseTest, TrainingHasNoCertificates) {
  request_.purpose = Purpose::kTraining;
  const Advice advice = Advise(request_);
  EXPECT_NE(Find(advice, "attention", "causal window 255,0"), nullptr);
  EXPECT_NE(Find(advice, "retention"), nullptr);
  EXPECT_EQ(Find(advice, "certified_attention"), nullptr);
  // Gradients have the sizes of their inputs.
  EXPECT_DOUBLE_EQ(Find(advice, "attention", "causal")->memory.arguments,
                   2 * 4.0 * kTokens * 2 * 8 * 4 + kTokens * 2 * 4);
}

TEST_F(AdviseTest, ShapesAloneArePredictedAndNothingIsRun) {
  Price(1, {{"gla prefill", 0.125}});
  request_.source = nullptr;
  request_.sizes = {1, 4096, 4096, 8, 2, 64, 64};
  const Advice advice = Advise(request_);
  EXPECT_EQ(advice.rows[0].mechanism, "gla");
  EXPECT_EQ(advice.sample_tokens, 0);
  for (const Row& row : advice.rows) {
    EXPECT_TRUE(std::isnan(row.measured_seconds));
    EXPECT_TRUE(std::isnan(row.error.relative));
    EXPECT_FALSE(row.frontier);
  }
}

TEST_F(AdviseTest, ShapesWithoutAModelAreRefusedWithWhatToDo) {
  request_.source = nullptr;
  request_.sizes = {1, 64, 64, 2, 2, 8, 8};
  EXPECT_THAT([&] { Advise(request_); },
              ThrowsMessage<InvalidArgument>("there is no cost model, which times at 64 tokens have to be predicted "
                                             "from: run heed advise --calibrate once, in less than two minutes"));
}

TEST_F(AdviseTest, RowsArePredictedForACluster) {
  Price(1, {{"gla prefill", 0.125}});
  request_.source = nullptr;
  request_.sizes = {1, 65536, 65536, 8, 8, 64, 64};
  request_.mechanisms = {"attention", "gla", "linformer"};
  request_.cluster = Cluster{.ranks = 4};
  const Advice advice = Advise(request_);
  const Row* gla = Find(advice, "gla");
  ASSERT_EQ(gla->divided.size(), 2u);
  EXPECT_EQ(gla->divided[0].method, "composed");
  EXPECT_DOUBLE_EQ(gla->divided[0].computation_seconds, 0.125 / 2);
  EXPECT_EQ(Find(advice, "linformer")->not_divided, "the mechanism takes no group");
  for (const Row& row : advice.rows) EXPECT_NE(row.divided.empty(), row.not_divided.empty()) << row.mechanism;
  for (const auto& [cluster, name] : {std::pair{Cluster{.ranks = 0}, "ranks is 0"},
                                      {Cluster{.ranks = 2, .bandwidth = 0}, "bandwidth is 0"},
                                      {Cluster{.ranks = 2, .latency = -1}, "latency is -1"}}) {
    request_.cluster = cluster;
    EXPECT_THAT([&] { Advise(request_); }, ThrowsMessage<InvalidArgument>(HasSubstr(name)));
  }
}

TEST_F(AdviseTest, MissingInputsAreNamed) {
  const Advice advice = Advise(request_);
  EXPECT_THAT(advice.left_out, Contains(Pair("delta_rule", "needs beta too: give them by these names")));
  EXPECT_EQ(Find(advice, "delta_rule"), nullptr);
  Add("beta", {1, kTokens, 2});
  const Advice with = Advise(request_);
  EXPECT_NE(Find(with, "delta_rule"), nullptr);
  EXPECT_THAT(with.left_out, Not(Contains(Key("delta_rule"))));
}

TEST_F(AdviseTest, MissingFactsAreAssumedAndReported) {
  const Advice advice = Advise(request_);
  EXPECT_THAT(Find(advice, "gla")->assumed, testing::ElementsAre("log_decay"));
  Add("log_decay", {1, kTokens, 2, 8});
  for (int64_t i = 0; i < memory_.back().view().num_elements(); ++i) memory_.back().as<float>()[i] = -0.1F;
  request_.mechanisms = {"gla"};
  EXPECT_THAT(Advise(request_).rows[0].assumed, testing::IsEmpty());
}

TEST_F(AdviseTest, OnlyTheMechanismsThatAreNamedAreThere) {
  request_.mechanisms = {"retention", "attention"};
  for (const Row& row : Advise(request_).rows)
    EXPECT_TRUE(row.mechanism == "retention" || row.mechanism == "attention");
  request_.mechanisms = {"delta_rule"};
  EXPECT_THAT([&] { Advise(request_); },
              ThrowsMessage<InvalidArgument>("nothing to rank: delta_rule needs beta too: give them by these names"));
  request_.mechanisms = {"linformer"};
  request_.purpose = Purpose::kDecode;
  EXPECT_THAT([&] { Advise(request_); },
              ThrowsMessage<InvalidArgument>(HasSubstr("none of these mechanisms is there for decode")));
}

TEST_F(AdviseTest, BadSizesAreRefusedInOneSentence) {
  request_.length = 0;
  EXPECT_THAT([&] { Advise(request_); }, ThrowsMessage<InvalidArgument>(HasSubstr("length is 0, expected 1 to ")));
  request_.length.reset();
  Add("k", {1, kTokens + 1, 2, 8});
  Add("v", {1, kTokens + 1, 2, 8});
  EXPECT_THAT([&] { Advise(request_); },
              ThrowsMessage<InvalidArgument>(
                  "file: q has 512 tokens and k 513, expected as many: heed compare takes such tensors"));
}

TEST_F(AdviseTest, KeyHeadsMayBeFewer) {
  Add("k", {1, kTokens, 1, 8});
  Add("v", {1, kTokens, 1, 8});
  const Advice advice = Advise(request_);
  EXPECT_LT(Find(advice, "attention", "causal")->error.relative, 1e-6);
  EXPECT_NE(Find(advice, "retention"), nullptr);
}

TEST_F(AdviseTest, SixteenBitsAreComparedWithTheNumbersThatWereGiven) {
  request_.dtypes = {DType::kBF16};
  request_.mechanisms = {"attention"};
  const double error = Find(Advise(request_), "attention", "causal")->error.relative;
  EXPECT_GT(error, 1e-4);
  EXPECT_LT(error, 2e-2);
}

TEST(SampleTest, ASampleUsesTheAvailableTime) {
  EXPECT_EQ(SampleTokens(1000, 5, 10), 1000);
  EXPECT_EQ(SampleTokens(1000, 40, 10), 448);  // half, in multiples of 64
  EXPECT_EQ(SampleTokens(100000, 1e9, 1), 64);
  EXPECT_EQ(SampleTokens(30, 1e9, 1), 30);
  EXPECT_EQ(SampleTokens(1000, 5, 0), 64);
}

}  // namespace
}  // namespace heed::advise
