// A ring whose messages move while its ranks compute: the order of starts, computation and finishes, and the bits of a
// ring without that. Ranks are threads, and each message takes a while.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/distributed/distributed.h"
#include "heed/harness/buffer.h"
#include "tests/local_transport.h"

namespace heed {
namespace {

using distributed::AttentionOptions;
using distributed::ExpectNone;
using distributed::Group;
using distributed::LocalRanks;
using distributed::Method;
using distributed::Order;
using distributed::TokenRange;
using distributed::Transport;
using Ranges = std::vector<std::vector<TokenRange>>;

constexpr int64_t B = 1, T = 192, H = 4, D = 16;
constexpr int kRanks = 3;

// The transport of a group with `start` and `finish`: messages are sent one after the other by other threads, each
// after a delay. It keeps a letter for each start (s), finish (f), and computation (C), of which
// repetitions count once.
class Delayed {
 public:
  explicit Delayed(const Group& group) : inner_(group.transport()) {}
  Delayed(const Delayed&) = delete;
  Delayed& operator=(const Delayed&) = delete;
  ~Delayed() {
    if (last_.valid()) last_.wait();
  }

  Group group() {
    Transport t = inner_;
    t.self = this;
    t.all_gather = [](void* self, const void* sent, int64_t num_bytes, void* received) {
      const Transport& inner = Of(self).inner_;
      inner.all_gather(inner.self, sent, num_bytes, received);
    };
    t.send_receive = [](void*, const void*, int64_t, int, void*, int64_t, int) {
      throw std::logic_error("a ring with start calls no send_receive");
    };
    t.all_to_all = [](void*, const void*, const int64_t*, void*, const int64_t*) { throw std::logic_error("unused"); };
    t.broadcast = [](void*, void*, int64_t, int) { throw std::logic_error("unused"); };
    t.start = [](void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                 int from) -> void* {
      Delayed& of = Of(self);
      of.events_ += 's';
      if (of.num_starts_++ == of.failing_start_) throw std::runtime_error("no start");
      of.last_ = std::async(std::launch::async, [=, before = of.last_, inner = of.inner_] {
                   if (before.valid()) before.wait();
                   std::this_thread::sleep_for(std::chrono::milliseconds(2));
                   inner.send_receive(inner.self, sent, num_sent, to, received, num_received, from);
                 }).share();
      ++of.num_open_;
      return new std::shared_future<void>(of.last_);
    };
    t.finish = [](void* self, void* started) {
      Delayed& of = Of(self);
      of.events_ += 'f';
      --of.num_open_;
      const std::unique_ptr<std::shared_future<void>> message(static_cast<std::shared_future<void>*>(started));
      message->get();
    };
    return Group(t);
  }

  // Two workers, one after the other.
  Executor executor() {
    return {this, [](void*) { return 2; },
            [](void* self, int num_workers, void (*body)(void*, int), void* argument) {
              std::string& events = Of(self).events_;
              if (events.empty() || events.back() != 'C') events += 'C';
              for (int worker = 0; worker < num_workers; ++worker) body(argument, worker);
            }};
  }

  std::string Take() { return std::exchange(events_, {}); }
  void FailAt(int start) { failing_start_ = num_starts_ + start; }
  int num_open() const { return num_open_; }

 private:
  static Delayed& Of(void* self) { return *static_cast<Delayed*>(self); }

  Transport inner_;
  std::string events_;
  std::shared_future<void> last_;
  int num_starts_ = 0, failing_start_ = -1, num_open_ = 0;
};

// The tensors of one rank, and its results.
struct Part {
  Part(const std::vector<TokenRange>& ranges, uint64_t seed) {
    const int64_t tokens = CountTokens(ranges);
    for (Buffer* const t : {&q, &k, &v, &d_o}) *t = Buffer(DType::kF32, {B, tokens, H, D}).FillNormal(seed++);
    for (Buffer* const t : {&o, &dq, &dk, &dv}) *t = Buffer(DType::kF32, {B, tokens, H, D});
    lse = Buffer(DType::kF32, {B, H, tokens});
  }
  void Forward(Context& ctx, const Group& group, const attention::Options& options, const AttentionOptions& how) const {
    distributed::Forward(ctx, group, {q.view(), k.view(), v.view()}, options, {o.view(), lse.view()}, how);
  }
  void Backward(Context& ctx, const Group& group, const attention::Options& options,
                const AttentionOptions& how) const {
    distributed::Backward(ctx, group, {q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), {}}, options,
                          {dq.view(), dk.view(), dv.view(), {}, {}, {}, {}, {}}, how);
  }
  Buffer q, k, v, d_o, o, lse, dq, dk, dv;
};

struct Passes {
  std::vector<Part> parts;
  std::vector<std::string> forward, backward;  // events of each rank
};

Passes RunRing(Order order, bool causal, bool delayed) {
  const Ranges ranges = distributed::ShardRanges(T, kRanks, order);
  Passes passes;
  for (int r = 0; r < kRanks; ++r) {
    passes.parts.emplace_back(ranges[static_cast<size_t>(r)], static_cast<uint64_t>(4 * r + 1));
  }
  passes.forward.resize(kRanks);
  passes.backward.resize(kRanks);
  attention::Options options;
  options.causal = causal;
  const AttentionOptions how = {.method = Method::kRing, .order = order};
  LocalRanks ranks(kRanks);
  ExpectNone(ranks.Run([&](const Group& of) {
    const auto rank = static_cast<size_t>(of.rank());
    Delayed slow(of);
    const Group group = delayed ? slow.group() : of;
    Context ctx(slow.executor());
    passes.parts[rank].Forward(ctx, group, options, how);
    passes.forward[rank] = slow.Take();
    passes.parts[rank].Backward(ctx, group, options, how);
    passes.backward[rank] = slow.Take();
  }));
  return passes;
}

TEST(DistributedRing, PartsMoveWhileARankComputes) {
  const Passes passes = RunRing(Order::kContiguous, false, true);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    // Keys and values of the next step start before a step computes; the results are merged and rounded at last.
    EXPECT_EQ(passes.forward[rank],
              "ssCff"
              "ssCff"
              "C")
        << rank;
    // Gradients of a step move while the next one computes, beside its keys and values.
    EXPECT_EQ(passes.backward[rank],
              "ssCffss"
              "ssCffffss"
              "Cffssff")
        << rank;
  }
}

TEST(DistributedRing, BitsDoNotDependOnWhenPartsMove) {
  for (const Order order : {Order::kContiguous, Order::kZigzag}) {
    for (const bool causal : {false, true}) {
      const Passes expected = RunRing(order, causal, false), got = RunRing(order, causal, true);
      for (size_t rank = 0; rank < kRanks; ++rank) {
        const Part &a = got.parts[rank], &b = expected.parts[rank];
        for (const auto& [x, y] : {std::pair(a.o, b.o), {a.lse, b.lse}, {a.dq, b.dq}, {a.dk, b.dk}, {a.dv, b.dv}}) {
          EXPECT_TRUE(SameBits(x.view(), y.view())) << rank << causal;
        }
      }
    }
  }
}

TEST(DistributedRing, MessagesAreFinishedAfterAnError) {
  const Ranges ranges = distributed::ShardRanges(T, kRanks, Order::kContiguous);
  LocalRanks ranks(kRanks);
  const auto errors = ranks.Run([&](const Group& of) {
    const Part part(ranges[static_cast<size_t>(of.rank())], 1);
    Delayed slow(of);
    Context ctx(slow.executor());
    slow.FailAt(1);  // the values of the first step
    try {
      part.Forward(ctx, slow.group(), {}, {.method = Method::kRing});
    } catch (const std::runtime_error&) {
      EXPECT_EQ(slow.num_open(), 0) << "memory is released that a message uses";
      EXPECT_EQ(slow.Take(), "ssf");
      throw;
    }
  });
  for (const std::exception_ptr& error : errors) EXPECT_TRUE(error);
}

TEST(DistributedRing, StartAndFinishAreGivenTogether) {
  Transport t;
  t.start = [](void*, const void*, int64_t, int, void*, int64_t, int) -> void* { return nullptr; };
  EXPECT_THROW(Group{t}, InvalidArgument);
}

}  // namespace
}  // namespace heed
