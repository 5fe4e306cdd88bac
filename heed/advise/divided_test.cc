// Formulas of calls that processes share. Bytes are compared with counted ones in tests/divided_bytes_test.cc.
#include "heed/advise/divided.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"

namespace heed::advise {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using Method = DividedMethod;

constexpr double kMiB = 1 << 20;

// The tensors of benchmarks/distributed.py with --ranks 2: 8192 tokens, 8 heads of 64 channels, f32.
constexpr Sizes kSizes = {1, 8192, 8192, 8, 8, 64, 64};
constexpr double kRow = 4 * 8 * 64, kOwn = 4096;

double Bytes(Method method, Pass pass) { return AttentionTraffic(method, pass, kSizes, DType::kF32, 2).bytes; }

// A mechanism's candidate, with shapes alone.
std::unique_ptr<Candidate> CandidateOf(const std::string& name, Purpose purpose, const Sizes& sizes = kSizes) {
  Question question;
  question.purpose = purpose;
  question.sizes = sizes;
  for (const OpEntry& op : AllOps()) {
    if (op.name == name) return MechanismCandidate(question, op, {}, DType::kF32);
  }
  throw InternalError(name);
}

Candidates AttentionOf(Purpose purpose, const attention::Options& exact, const Sizes& sizes = kSizes) {
  Question question;
  question.purpose = purpose;
  question.sizes = sizes;
  question.exact = exact;
  question.dtypes = {DType::kF32};
  return AttentionCandidates(question);
}

// The numbers that `scripts/bench distributed` counts with two processes of heed.torch.
TEST(DividedTest, AttentionReceivesWhatHeedTorchWasCountedToReceive) {
  EXPECT_EQ(Bytes(Method::kAllGather, Pass::kForward), 2 * kOwn * kRow);
  EXPECT_EQ(Bytes(Method::kAllGather, Pass::kBackward), 2 * kOwn * kRow);
  EXPECT_EQ(Bytes(Method::kZigzag, Pass::kForward), 2 * kOwn * kRow);
  EXPECT_EQ(Bytes(Method::kUlysses, Pass::kForward), (3 * kOwn / 2 + kOwn / 2) * kRow + kOwn / 2 * 8 * 4);  // and lse
  EXPECT_EQ(Bytes(Method::kUlysses, Pass::kBackward), (3 * kOwn / 2 + kOwn / 2) * kRow);
  EXPECT_EQ(Bytes(Method::kRing, Pass::kForward), 2 * kOwn * kRow);
  EXPECT_EQ(Bytes(Method::kRing, Pass::kBackward), 3 * 2 * kOwn * kRow);
}

TEST(DividedTest, StatesReceiveWhatHeedTorchWasCountedToReceive) {
  const double state = 8 * 64 * 64 * 4, rows = 8 * 64 * 4;
  const std::vector<OutputSpec> outputs = {{"o", DType::kF32, {1, 8192, 8, 64}, {}},
                                           {"state", DType::kF32, {1, 8, 64, 64}, {}}};
  const auto bytes = [](Pass pass, const StateBytes& states) {
    return StateTraffic(Method::kComposed, pass, states, 8192, 2).bytes;
  };
  const StateBytes gla = StateBytesOf(StateKind::kDecays, outputs), delta = StateBytesOf(StateKind::kDelta, outputs);
  EXPECT_EQ(bytes(Pass::kForward, gla), state + rows);
  EXPECT_EQ(bytes(Pass::kBackward, gla), state);
  EXPECT_EQ(bytes(Pass::kForward, delta), 2 * state);
  EXPECT_EQ(bytes(Pass::kBackward, delta), state);
  const std::vector<OutputSpec> scan = {{"state", DType::kF32, {1, 512, 16}, {}}};
  EXPECT_EQ(bytes(Pass::kForward, StateBytesOf(StateKind::kElementwise, scan)), 2 * 512 * 16 * 4);
  EXPECT_EQ(bytes(Pass::kBackward, StateBytesOf(StateKind::kElementwise, scan)), 512 * 16 * 4);
}

TEST(DividedTest, MessagesAndBytesTakeTime) {
  const Cluster cluster = {.ranks = 4, .bandwidth = 1e6, .latency = 0.5};
  EXPECT_DOUBLE_EQ((Traffic{2e6, 3}.Seconds(cluster)), 3.5);
  EXPECT_DOUBLE_EQ((Traffic{2e6, 3, 4}.Seconds(cluster)), 9.5);
  // The comparison of calls, k and v.
  EXPECT_EQ(AttentionTraffic(Method::kAllGather, Pass::kForward, kSizes, DType::kF32, 4).messages, 9);
  // Each rank waits for the one before it.
  const StateBytes states = {.states = 100, .transitions = 0, .gradients = 100};
  const Traffic relay = StateTraffic(Method::kRelay, Pass::kForward, states, 8192, 4);
  EXPECT_EQ(relay.bytes, 100);
  EXPECT_EQ(relay.hops, 3);
}

TEST(DividedTest, OneRankIsOneProcess) {
  for (const Method method : {Method::kUlysses, Method::kAllGather, Method::kZigzag, Method::kRing}) {
    const Traffic traffic = AttentionTraffic(method, Pass::kForward, kSizes, DType::kF32, 1);
    EXPECT_EQ(traffic.bytes, 0);
    EXPECT_EQ(traffic.messages, 0);
    EXPECT_EQ(WorkShare(method, {.is_attention = true, .causal = true}, 8192, 1), 1);
  }
  const Context ctx(1);
  for (const char* name : {"gla", "retention"}) {
    const auto candidate = CandidateOf(name, Purpose::kTraining);
    const std::vector<Divided> divided = Divide(ctx, *candidate, Purpose::kTraining, kSizes, 1, 0.25, {.ranks = 1});
    ASSERT_EQ(divided.size(), 1u);
    EXPECT_EQ(divided[0].forward.bytes + divided[0].backward.bytes, 0);
    EXPECT_EQ(divided[0].seconds(), 0.25);
    const Memory memory = candidate->MemoryAt(ctx, kSizes, 1);
    EXPECT_EQ(divided[0].memory_bytes, memory.arguments + memory.workspace + memory.state);
  }
}

TEST(DividedTest, TheLastOfContiguousPartsHasTheMostPairs) {
  const Division causal = {.is_attention = true, .causal = true};
  EXPECT_NEAR(WorkShare(Method::kAllGather, causal, 65536, 4), 7.0 / 16, 1e-4);  // (2 R - 1) / R^2
  EXPECT_NEAR(WorkShare(Method::kZigzag, causal, 65536, 4), 0.25, 1e-4);
  EXPECT_EQ(WorkShare(Method::kUlysses, causal, 65536, 4), 0.25);
  const Division all = {.is_attention = true};
  EXPECT_DOUBLE_EQ(WorkShare(Method::kAllGather, all, 65536, 4), 0.25);
}

// Pairs counted one by one.
TEST(DividedTest, PairsOfWindowsAreCounted) {
  constexpr int64_t T = 300, kRanks = 3;
  for (const Division& division : {Division{.is_attention = true, .causal = true, .window = {20, 0}},
                                   {.is_attention = true, .causal = false, .window = {7, 11}},
                                   {.is_attention = true, .causal = true, .window = {-1, 5}},
                                   {.is_attention = true, .causal = false, .window = {1000, -1}}}) {
    std::vector<double> pairs;
    for (const auto& parts : PartsOfRanks(T, kRanks, false)) {
      double own = 0;
      for (int64_t i = parts[0].begin; i < parts[0].end; ++i) {
        for (int64_t j = 0; j < T; ++j) {
          const auto [left, right] = division.window;
          own += (!division.causal || j <= i) && (left < 0 || j >= i - left) && (right < 0 || j <= i + right) ? 1 : 0;
        }
      }
      pairs.push_back(own);
    }
    EXPECT_NEAR(WorkShare(Method::kAllGather, division, T, kRanks),
                *std::ranges::max_element(pairs) / (pairs[0] + pairs[1] + pairs[2]), 1e-12);
  }
}

TEST(DividedTest, ComposedSummariesTakeTwiceTheWorkUnlessThereIsOneSegment) {
  EXPECT_DOUBLE_EQ(WorkShare(Method::kComposed, {}, 8192, 2), 1);
  EXPECT_DOUBLE_EQ(WorkShare(Method::kComposed, {}, 65536, 8), 0.25);
  EXPECT_DOUBLE_EQ(WorkShare(Method::kRelay, {}, 65536, 8), 1);
  EXPECT_DOUBLE_EQ(WorkShare(Method::kComposed, {}, 1, 2), 1);  // one rank has the only token
  EXPECT_EQ(StateTraffic(Method::kComposed, Pass::kForward, {100, 100, 100}, 1, 2).bytes, 0);
}

// A fast cluster hides all messages behind a part's computation, and a slow one all computation but the last part.
TEST(DividedTest, ARingOverlapsInAllStepsButTheLast) {
  const Context ctx(1);
  const auto candidate = std::move(AttentionOf(Purpose::kTraining, {}).at(0));
  const auto ring = [&](double bandwidth, bool overlaps) {
    const Cluster cluster = {.ranks = 4, .bandwidth = bandwidth, .latency = 1e-3, .overlaps = overlaps};
    for (Divided& divided : Divide(ctx, *candidate, Purpose::kTraining, kSizes, 1, 8, cluster)) {
      if (divided.method == "ring") return divided;
      EXPECT_EQ(divided.seconds(), divided.communication_seconds + divided.computation_seconds) << divided.method;
    }
    throw InternalError("ring");
  };
  const Divided fast = ring(1e9, true), slow = ring(1e6, true), alone = ring(1e9, false);
  EXPECT_LT(fast.communication_seconds, 1.5);
  EXPECT_DOUBLE_EQ(fast.computation_seconds, 2);
  EXPECT_DOUBLE_EQ(fast.seconds(), 2);
  EXPECT_GT(slow.communication_seconds, 1.5);
  EXPECT_DOUBLE_EQ(slow.seconds(), slow.communication_seconds + 0.5);
  EXPECT_DOUBLE_EQ(alone.seconds(), alone.communication_seconds + 2);
}

TEST(DividedTest, MethodsAreThoseOfHeedTorch) {
  const Context ctx(1);
  attention::Options exact;
  exact.causal = true;
  const Candidates candidates = AttentionOf(Purpose::kPrefill, exact);
  const auto methods = [&](int64_t ranks) {
    std::vector<std::string> names;
    for (const Divided& divided : Divide(ctx, *candidates[0], Purpose::kPrefill, kSizes, 1, 1, {.ranks = ranks})) {
      names.push_back(divided.method);
    }
    return names;
  };
  EXPECT_THAT(methods(4), testing::ElementsAre("ulysses", "all_gather", "all_gather, zigzag", "ring"));
  EXPECT_THAT(methods(3), testing::ElementsAre("all_gather", "all_gather, zigzag", "ring"));
}

TEST(DividedTest, MemoryOfARankFalls) {
  const Context ctx(1);
  attention::Options exact;
  exact.causal = true;
  for (const Purpose purpose : {Purpose::kPrefill, Purpose::kTraining}) {
    const Candidates attention = AttentionOf(purpose, exact);
    const auto gla = CandidateOf("gla", purpose);
    for (const Candidate* candidate : std::initializer_list<const Candidate*>{attention[0].get(), gla.get()}) {
      const auto memory = [&](int64_t ranks) {
        return Divide(ctx, *candidate, purpose, kSizes, 1, 1, {.ranks = ranks})[0].memory_bytes;
      };
      EXPECT_LT(memory(4), 0.75 * memory(1)) << candidate->mechanism;
      EXPECT_GT(memory(4), 16 * kMiB) << candidate->mechanism;  // q, k, v and o alone
    }
  }
}

TEST(DividedTest, WhatAGroupRefusesIsNamed) {
  const Context ctx(1);
  attention::Options exact;
  exact.causal = true;
  exact.pattern = Pattern::Parse("sliding_window(64)");
  const auto divide = [&](const Candidate& candidate, Purpose purpose) {
    Divide(ctx, candidate, purpose, kSizes, 1, 1, {.ranks = 2});
  };
  const Candidates patterns = AttentionOf(Purpose::kPrefill, exact);
  EXPECT_THAT([&] { divide(*patterns[0], Purpose::kPrefill); },
              ThrowsMessage<Unsupported>("a group does not divide patterns"));
  exact.pattern = {};
  for (const auto& candidate : AttentionOf(Purpose::kPrefill, exact)) {
    if (!candidate->chooses) continue;
    EXPECT_THROW(divide(*candidate, Purpose::kPrefill), Unsupported) << candidate->options;
  }
  for (const auto& candidate : AttentionOf(Purpose::kDecode, exact)) {
    EXPECT_THAT([&] { divide(*candidate, Purpose::kDecode); }, ThrowsMessage<Unsupported>(HasSubstr("decoding")));
  }
  EXPECT_THAT([&] { divide(*CandidateOf("longformer", Purpose::kPrefill), Purpose::kPrefill); },
              ThrowsMessage<Unsupported>("the mechanism takes no group"));
}

}  // namespace
}  // namespace heed::advise
