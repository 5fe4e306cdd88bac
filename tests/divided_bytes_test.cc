// Formulas of the adviser for calls that processes share (heed/advise/divided.h) against bytes and messages that are
// counted. Ranks are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "heed/advise/divided.h"
#include "heed/core/error.h"
#include "heed/distributed/distributed.h"
#include "heed/harness/buffer.h"
#include "tests/local_transport.h"
#include "tests/segments_call.h"

namespace heed {
namespace {

using namespace segments;  // NOLINT: of tests
using advise::Caller;
using advise::DividedMethod;
using advise::Pass;
using advise::StateKind;
using advise::Traffic;
using distributed::Group;
using distributed::LocalRanks;
using distributed::Order;
using distributed::SequenceOptions;
using distributed::ShardRanges;
using distributed::TokenRange;
using distributed::Transport;
using Ranges = std::vector<std::vector<TokenRange>>;

// A transport that counts what comes from other ranks. The comparison of calls, which is the first message of a call,
// counts as messages alone.
class Counted {
 public:
  explicit Counted(const Group& group) : inner_(group.transport()) {}
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  Group group() {
    Transport t;
    t.self = this;
    t.rank = inner_.rank;
    t.size = inner_.size;
    t.all_gather = [](void* self, const void* sent, int64_t num_bytes, void* received) {
      Counted& of = Of(self);
      of.Add(of.compared_ ? static_cast<double>(num_bytes) * (of.inner_.size - 1) : 0, of.inner_.size - 1);
      of.compared_ = true;
      of.inner_.all_gather(of.inner_.self, sent, num_bytes, received);
    };
    t.send_receive = [](void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                        int from) {
      Counted& of = Of(self);
      if (from >= 0) of.Add(static_cast<double>(num_received), 1);
      of.inner_.send_receive(of.inner_.self, sent, num_sent, to, received, num_received, from);
    };
    t.all_to_all = [](void* self, const void* sent, const int64_t* num_sent, void* received,
                      const int64_t* num_received) {
      Counted& of = Of(self);
      for (int r = 0; r < of.inner_.size; ++r) {
        if (r != of.inner_.rank) of.Add(static_cast<double>(num_received[r]), 1);
      }
      of.inner_.all_to_all(of.inner_.self, sent, num_sent, received, num_received);
    };
    t.broadcast = [](void* self, void* data, int64_t num_bytes, int root) {
      Counted& of = Of(self);
      if (root != of.inner_.rank) of.Add(static_cast<double>(num_bytes), 1);
      of.inner_.broadcast(of.inner_.self, data, num_bytes, root);
    };
    return Group(t);
  }

  // Returns what has come since the last call of Take.
  Traffic Take() {
    compared_ = false;
    return std::exchange(counted_, {});
  }

 private:
  static Counted& Of(void* self) { return *static_cast<Counted*>(self); }
  void Add(double bytes, int messages) {
    counted_.bytes += bytes;
    counted_.messages += messages;
  }

  Transport inner_;
  Traffic counted_;
  bool compared_ = false;
};

// Traffic of each rank, and the largest of them.
struct Most {
  explicit Most(int ranks) : forward(static_cast<size_t>(ranks)), backward(forward) {}
  static Traffic Of(const std::vector<Traffic>& ranks) {
    Traffic most;
    for (const Traffic& traffic : ranks) {
      most.bytes = std::max(most.bytes, traffic.bytes);
      most.messages = std::max(most.messages, traffic.messages);
    }
    return most;
  }
  std::vector<Traffic> forward, backward;
};

void ExpectPredicted(const Traffic& counted, const Traffic& predicted, const std::string& what) {
  EXPECT_GT(counted.bytes, 0) << what;
  EXPECT_NEAR(predicted.bytes / counted.bytes, 1, 1e-9)
      << what << ": predicted " << predicted.bytes << ", counted " << counted.bytes;
}

void ExpectNone(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

// The parts of one rank, one after the other.
Buffer Take(const Buffer& whole, const std::vector<TokenRange>& ranges) {
  Shape shape(whole.view().sizes().begin(), whole.view().sizes().end());
  shape[1] = CountTokens(ranges);
  const Buffer part(whole.view().dtype(), shape);
  int64_t first = 0;
  for (const TokenRange& range : ranges) {
    const ConstTensorView from = whole.view().Slice(1, range.begin, range.end);
    const TensorView to = part.view().Slice(1, first, first + range.size());
    ForEach(to, [&](const Shape& at) { SetElement(to, at, GetElement(from, at)); });
    first += range.size();
  }
  return part;
}

TEST(DividedBytesTest, PartsAreThoseOfShardRanges) {
  for (const int64_t tokens : {0, 1, 5, 127, 600, 4096, 100000}) {
    for (const int ranks : {1, 2, 3, 8}) {
      for (const Order order : {Order::kContiguous, Order::kZigzag}) {
        const Ranges expected = ShardRanges(tokens, ranks, order);
        const auto parts = advise::PartsOfRanks(tokens, ranks, order == Order::kZigzag);
        ASSERT_EQ(parts.size(), expected.size());
        for (size_t r = 0; r < parts.size(); ++r) {
          ASSERT_EQ(parts[r].size(), expected[r].size());
          for (size_t i = 0; i < parts[r].size(); ++i) {
            EXPECT_EQ(parts[r][i].begin, expected[r][i].begin);
            EXPECT_EQ(parts[r][i].end, expected[r][i].end);
          }
        }
      }
    }
  }
}

TEST(DividedBytesTest, AttentionReceivesWhatIsPredicted) {
  using distributed::Method;
  const Sizes s = {2, 600, 600, 12, 6, 16, 12};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Buffer q = Buffer(dtype, {s.B, s.Tq, s.Hq, s.D}).FillNormal(1);
    const Buffer k = Buffer(dtype, {s.B, s.Tk, s.Hkv, s.D}).FillNormal(2);
    const Buffer v = Buffer(dtype, {s.B, s.Tk, s.Hkv, s.Dv}).FillNormal(3);
    const Buffer d_o = Buffer(dtype, {s.B, s.Tq, s.Hq, s.Dv}).FillNormal(4);
    attention::Options options;
    options.causal = true;
    for (const auto& [ranks, caller] :
         {std::pair{2, Caller::kCpp}, {3, Caller::kCpp}, {2, Caller::kPyTorch}, {3, Caller::kPyTorch}}) {
      for (const auto& [method, order, predicted] :
           {std::tuple{Method::kAllGather, Order::kContiguous, DividedMethod::kAllGather},
            {Method::kAllGather, Order::kZigzag, DividedMethod::kZigzag},
            {Method::kUlysses, Order::kContiguous, DividedMethod::kUlysses},
            {Method::kRing, Order::kContiguous, DividedMethod::kRing}}) {
        Most most(ranks);
        const Ranges ranges = ShardRanges(s.Tk, ranks, order);
        LocalRanks local(ranks);
        ExpectNone(local.Run([&, method = method, order = order, caller = caller](const Group& of) {
          const auto rank = static_cast<size_t>(of.rank());
          const std::vector<TokenRange>& own = ranges[rank];
          const int64_t tokens = CountTokens(own);
          const Buffer own_q = Take(q, own), own_k = Take(k, own), own_v = Take(v, own), own_d_o = Take(d_o, own);
          const Buffer o(dtype, own_d_o.view().sizes()), lse(DType::kF32, {s.B, s.Hq, tokens});
          const Buffer dq(dtype, own_q.view().sizes()), dk(dtype, own_k.view().sizes()),
              dv(dtype, own_v.view().sizes());
          Counted counted(of);
          const Group group = counted.group();
          Context ctx(1);
          distributed::AttentionReceived received;
          distributed::AttentionOptions how = {method, order};
          if (caller == Caller::kPyTorch) how.received = &received;
          distributed::Forward(ctx, group, {own_q.view(), own_k.view(), own_v.view()}, options,
                               {.o = o.view(), .lse = lse.view()}, how);
          most.forward[rank] = counted.Take();
          distributed::Backward(ctx, group,
                                {own_q.view(), own_k.view(), own_v.view(), o.view(), lse.view(), own_d_o.view(), {}},
                                options, {dq.view(), dk.view(), dv.view(), {}, {}, {}, {}, {}}, how);
          most.backward[rank] = counted.Take();
        }));
        for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
          const std::string what = std::string(Name(predicted)) + " " + Name(dtype) + " " + std::to_string(ranks) +
                                   (pass == Pass::kForward ? " forward" : " backward");
          const Traffic got = Most::Of(pass == Pass::kForward ? most.forward : most.backward);
          const Traffic expected = AttentionTraffic(predicted, pass, s, dtype, ranks, caller);
          ExpectPredicted(got, expected, what);
          EXPECT_EQ(got.messages, expected.messages) << what;
        }
      }
    }
  }
}

// Each mechanism with states that are summarised.
class DividedStates : public testing::TestWithParam<Mechanism> {};

StateKind KindOf(const Mechanism& m) {
  for (const char* name : {"delta_rule", "gated_delta_rule", "kda", "gdn2", "comba", "delta_product", "rwkv7"}) {
    if (m.name == name) return StateKind::kDelta;
  }
  return std::string(m.table.states[0].axes).ends_with('V') ? StateKind::kDecays : StateKind::kElementwise;
}

using Numbers = recurrent::Options;

// Both passes of a rank. Final states are not wanted, and those of the forward pass are kept.
void RunPasses(const std::string& name, Context& ctx, const Group& group, const Arguments& in, const TensorView& o,
               std::span<const TensorView> gradients, const SequenceOptions& sequence, const auto& between) {
#define HEED_RUN(op)                                                                                          \
  if (name == #op) {                                                                                          \
    using Of = Lists<op::Structs>;                                                                            \
    Arguments forward = in;                                                                                   \
    forward.d_o = {};                                                                                         \
    distributed::Forward(ctx, group, Of::InputsOf(forward), segments::Own<op::Options>(), Of::OutputsOf({o}), \
                         sequence);                                                                           \
    between();                                                                                                \
    distributed::Backward(ctx, group, Of::InputsOf(in), segments::Own<op::Options>(),                         \
                          Of::GradientsOf({{}, {}, gradients}), sequence);                                    \
    return;                                                                                                   \
  }
  HEED_DISTRIBUTED_MECHANISMS(HEED_RUN)
#undef HEED_RUN
  throw InternalError(name);
}

TEST_P(DividedStates, ReceiveWhatIsPredicted) {
  constexpr int64_t kTokens = 4500;  // the last rank has tokens of two segments
  const Call call(GetParam(), DType::kF32, kTokens, 6);
  const std::string& name = call.m.name;
  std::vector<OutputSpec> outputs;
  const StateBuffers states = call.States();
  for (size_t i = 0; i < states.buffers.size(); ++i) {
    const auto role = call.m.table.states[i].role;
    const ConstTensorView t = states.buffers[i].view();
    const char* const spec = role == mechanism::StateTensor::kMaximum      ? "state_m"
                             : role == mechanism::StateTensor::kNormaliser ? "state_z"
                                                                           : "state";
    if (t.present()) outputs.push_back({spec, t.dtype(), {t.sizes().begin(), t.sizes().end()}, {}});
  }
  const advise::StateBytes bytes = advise::StateBytesOf(KindOf(call.m), outputs);
  for (const int ranks : {2, 3}) {
    for (const bool relay : {false, true}) {
      const Ranges ranges = ShardRanges(kTokens, ranks, Order::kContiguous);
      Most most(ranks);
      LocalRanks local(ranks);
      ExpectNone(local.Run([&](const Group& of) {
        const auto rank = static_cast<size_t>(of.rank());
        const auto [begin, end] = ranges[rank][0];
        const Buffer whole_o = call.Output();
        std::vector<Buffer> memory;
        std::vector<TensorView> gradients;
        for (size_t i = 0; i < call.tensors.size(); ++i) {
          const ConstTensorView t = call.tensors[i].view();
          memory.push_back(t.present() ? Buffer(t.dtype(), t.sizes()) : Buffer());
          const int axis = call.TokenAxis(call.m.table.tensors[i]);
          const TensorView to = memory.back().view();
          gradients.push_back(axis >= 0 && t.present() ? to.Slice(axis, begin, end) : to);
        }
        const auto tensors = call.Tokens(begin, end);
        distributed::SequenceStates kept;
        Counted counted(of);
        const Group group = counted.group();
        Context ctx(1);
        const ConstTensorView d_o = call.d_o.view().Slice(call.OutputAxis(), begin, end);
        RunPasses(name, ctx, group, {tensors, {}, d_o, {}}, whole_o.view().Slice(call.OutputAxis(), begin, end),
                  gradients, {.relay = relay, .states = &kept}, [&] { most.forward[rank] = counted.Take(); });
        most.backward[rank] = counted.Take();
      }));
      const DividedMethod method = relay ? DividedMethod::kRelay : DividedMethod::kComposed;
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        const std::string what = name + " " + Name(method) + " " + std::to_string(ranks) +
                                 (pass == Pass::kForward ? " forward" : " backward");
        const Traffic got = Most::Of(pass == Pass::kForward ? most.forward : most.backward);
        const Traffic expected = StateTraffic(method, pass, bytes, kTokens, ranks);
        ExpectPredicted(got, expected, what);
        // In a relay a rank receives one message beside the comparison, and waits for those of the ranks before it.
        EXPECT_EQ(got.messages, relay ? ranks : expected.messages) << what;
      }
    }
  }
}

std::vector<Mechanism> Summarised() {
  std::vector<Mechanism> mechanisms;
  for (const Mechanism& m : Mechanisms()) {
    // h3 is always relayed. The adviser ranks neither, and the columns of ssd's state are not its last axis.
    if (m.name != "h3" && m.name != "ssd") mechanisms.push_back(m);
  }
  return mechanisms;
}

INSTANTIATE_TEST_SUITE_P(All, DividedStates, testing::ValuesIn(Summarised()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace heed
