// Mechanisms over a sequence that ranks hold in parts, against the call of one process. Ranks are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/distributed/distributed.h"
#include "heed/harness/buffer.h"
#include "tests/local_transport.h"
#include "tests/segments_call.h"

namespace heed {
namespace {

using namespace segments;  // NOLINT: of tests
using distributed::ExpectNone;
using distributed::Group;
using distributed::LocalRanks;
using distributed::SequenceOptions;
using distributed::SequenceStates;
using Numbers = recurrent::Options;  // lengths, starts, cu_seqlens and reverse

// The passes of a mechanism by name: divided among ranks, and of one process.
struct Passes {
  std::function<void(Context&, const Group&, const Arguments&, const Numbers&, const Results&, const SequenceOptions&)>
      forward, backward;
  std::function<void(Context&, const Arguments&, const Numbers&, const Results&)> single_forward, single_backward;
};

Passes PassesOf(const std::string& name) {
#define HEED_PASSES(op)                                                                                  \
  if (name == #op) {                                                                                     \
    using Of = Lists<op::Structs>;                                                                       \
    const auto with = [](const Numbers& n) { return mechanism::With(segments::Own<op::Options>(), n); }; \
    return {                                                                                             \
        [=](Context& c, const Group& g, const Arguments& in, const Numbers& n, const Results& out,       \
            const SequenceOptions& s) {                                                                  \
          distributed::Forward(c, g, Of::InputsOf(in), with(n), Of::OutputsOf(out), s);                  \
        },                                                                                               \
        [=](Context& c, const Group& g, const Arguments& in, const Numbers& n, const Results& out,       \
            const SequenceOptions& s) {                                                                  \
          distributed::Backward(c, g, Of::InputsOf(in), with(n), Of::GradientsOf(out), s);               \
        },                                                                                               \
        [=](Context& c, const Arguments& in, const Numbers& n, const Results& out) {                     \
          op::Forward(c, Of::InputsOf(in), with(n), Of::OutputsOf(out));                                 \
        },                                                                                               \
        [=](Context& c, const Arguments& in, const Numbers& n, const Results& out) {                     \
          op::Backward(c, Of::InputsOf(in), with(n), Of::GradientsOf(out));                              \
        },                                                                                               \
    };                                                                                                   \
  }
  HEED_DISTRIBUTED_MECHANISMS(HEED_PASSES)
#undef HEED_PASSES
  throw InternalError(name);
}

// The results of both passes, of all tokens.
struct Whole {
  explicit Whole(const Call& call) : o(call.Output()), final(call.States()), d_initial(call.States()) {
    for (const Buffer& t : call.tensors) {
      gradients.push_back(t.present() ? Buffer(t.view().dtype(), t.view().sizes()) : Buffer());
    }
  }
  // Without the gradients of constants.
  std::vector<TensorView> Differentiable(const Call& call) const {
    std::vector<TensorView> views = d_initial.views();
    for (size_t i = 0; i < views.size(); ++i) {
      if (!call.m.table.states[i].differentiable()) views[i] = {};
    }
    return views;
  }
  Buffer o;
  StateBuffers final, d_initial;
  std::vector<Buffer> gradients;
};

std::vector<ConstTensorView> FinalGradients(const Call& call) {
  std::vector<ConstTensorView> views = call.d_final.inputs();
  for (size_t i = 0; i < views.size(); ++i) {
    if (!call.m.table.states[i].differentiable()) views[i] = {};
  }
  return views;
}

Whole Single(const Call& call, const Numbers& numbers = {}) {
  const Passes passes = PassesOf(call.m.name);
  Whole whole(call);
  Context ctx(1);
  const auto tensors = call.Tokens(0, call.sizes.T), initial = call.initial.inputs(), d_final = FinalGradients(call);
  const auto final = whole.final.views(), d_initial = whole.Differentiable(call);
  passes.single_forward(ctx, {tensors, initial}, numbers, {whole.o.view(), final});
  std::vector<TensorView> gradients;
  for (const Buffer& gradient : whole.gradients) gradients.push_back(gradient.view());
  passes.single_backward(ctx, {tensors, initial, call.d_o.view(), d_final}, numbers, {{}, d_initial, gradients});
  return whole;
}

// Divides a call among ranks with these numbers of tokens. Every rank has the final states; the first one in the
// order of processing has the initial ones, and the last one their gradients.
Whole Divided(const Call& call, const Shape& counts, const SequenceOptions& options, const Numbers& numbers = {},
              bool keep = false) {
  const Passes passes = PassesOf(call.m.name);
  Whole whole(call);
  const auto ranks = static_cast<int>(counts.size());
  std::vector<Whole> own;
  for (size_t r = 0; r < counts.size(); ++r) own.emplace_back(call);
  LocalRanks local(ranks);
  ExpectNone(local.Run([&](const Group& group) {
    const int rank = group.rank(), first = numbers.reverse ? ranks - 1 : 0, last = ranks - 1 - first;
    const int64_t begin = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
    const int64_t end = begin + counts[static_cast<size_t>(rank)];
    Whole& mine = own[static_cast<size_t>(rank)];
    Context ctx(1);
    const auto tensors = call.Tokens(begin, end);
    auto initial = call.initial.inputs(), d_final = FinalGradients(call);
    auto final = mine.final.views(), d_initial = whole.Differentiable(call);
    if (rank != first) initial.assign(initial.size(), {}), d_initial.assign(d_initial.size(), {});
    if (rank != last) d_final.assign(d_final.size(), {});
    std::vector<TensorView> gradients;
    for (size_t i = 0; i < whole.gradients.size(); ++i) {
      const int axis = call.TokenAxis(call.m.table.tensors[i]);
      const TensorView t = whole.gradients[i].view();
      gradients.push_back(axis >= 0 && t.present() ? t.Slice(axis, begin, end) : mine.gradients[i].view());
    }
    SequenceStates states;
    SequenceOptions with = options;
    if (keep) with.states = &states;
    passes.forward(ctx, group, {tensors, initial}, numbers,
                   {whole.o.view().Slice(call.OutputAxis(), begin, end), final}, with);
    passes.backward(ctx, group, {tensors, initial, call.d_o.view().Slice(call.OutputAxis(), begin, end), d_final},
                    numbers, {{}, d_initial, gradients}, with);
  }));
  for (const Whole& of : own) {
    for (size_t i = 0; i < whole.final.buffers.size(); ++i) {
      EXPECT_TRUE(SameBits(of.final.buffers[i].view(), own[0].final.buffers[i].view())) << "final states of ranks";
    }
  }
  whole.final = own[0].final;
  for (size_t i = 0; i < whole.gradients.size(); ++i) {  // those of constants are sums over ranks
    if (!whole.gradients[i].present() || call.TokenAxis(call.m.table.tensors[i]) >= 0) continue;
    const TensorView sum = whole.gradients[i].view();
    ForEach(sum, [&](const Shape& at) {
      double total = 0;
      for (const Whole& of : own) total += GetElement(of.gradients[i].view(), at);
      SetElement(sum, at, total);
    });
  }
  return whole;
}

void ExpectNear(const Call& call, const Whole& got, const Whole& expected, double tolerance, const std::string& what) {
  EXPECT_LE(Difference(got.o.view(), expected.o.view()), tolerance) << what << " o";
  const StateBuffers a = Absolute(call.m, got.final), b = Absolute(call.m, expected.final);
  for (size_t i = 0; i < a.buffers.size(); ++i) {
    EXPECT_LE(Difference(a.buffers[i].view(), b.buffers[i].view()), tolerance)
        << what << " " << call.m.table.states[i].name;
  }
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    if (!got.gradients[i].present()) continue;
    EXPECT_LE(Difference(got.gradients[i].view(), expected.gradients[i].view()), 10 * tolerance)
        << what << " d" << call.m.table.tensors[i].name;
  }
  const auto views = got.Differentiable(call), others = expected.Differentiable(call);
  for (size_t i = 0; i < views.size(); ++i) {
    if (!views[i].present()) continue;
    EXPECT_LE(Difference(views[i], others[i]), 10 * tolerance) << what << " d" << call.m.table.states[i].name;
  }
}

// Gradients of constants are not compared: their parts are added in another order.
void ExpectBits(const Call& call, const Whole& got, const Whole& expected, bool gradients, const std::string& what) {
  EXPECT_TRUE(SameBits(got.o.view(), expected.o.view())) << what << " o";
  for (size_t i = 0; i < got.final.buffers.size(); ++i) {
    EXPECT_TRUE(SameBits(got.final.buffers[i].view(), expected.final.buffers[i].view()))
        << what << " " << call.m.table.states[i].name;
  }
  for (size_t i = 0; gradients && i < got.gradients.size(); ++i) {
    if (!got.gradients[i].present() || call.TokenAxis(call.m.table.tensors[i]) < 0) continue;
    EXPECT_TRUE(SameBits(got.gradients[i].view(), expected.gradients[i].view()))
        << what << " d" << call.m.table.tensors[i].name;
  }
}

class Distributed : public testing::TestWithParam<Mechanism> {
 protected:
  static double Tolerance(DType dtype) { return dtype == DType::kF64 ? 1e-11 : 2e-4; }
};

TEST_P(Distributed, PartsHaveTheResultsOfTheWhole) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const Call call(GetParam(), dtype, 150, 6);
    const Whole expected = Single(call);
    for (const Shape& counts : {Shape{100, 50}, Shape{150, 0}, Shape{64, 0, 86}}) {
      const std::string what = std::string(Name(dtype)) + " " + ShapeString(counts);
      ExpectNear(call, Divided(call, counts, {.segment = 40}), expected, Tolerance(dtype), what);
    }
  }
}

TEST_P(Distributed, LastTokensFirst) {
  Numbers numbers;
  numbers.reverse = true;
  const Call call(GetParam(), DType::kF64, 150, 7);
  ExpectNear(call, Divided(call, {30, 120}, {.segment = 64}, numbers), Single(call, numbers), 1e-11, "reverse");
}

TEST_P(Distributed, NumbersAreThoseOfTheWhole) {
  const int64_t lengths[] = {150, 40}, starts[] = {120, 3};
  Numbers numbers;
  numbers.lengths = {lengths, DType::kI64, {2}};
  numbers.starts = {starts, DType::kI64, {2}};
  const Call call(GetParam(), DType::kF64, 150, 8);
  ExpectNear(call, Divided(call, {70, 80}, {.segment = 64}, numbers), Single(call, numbers), 1e-11, "lengths");
}

// A sequence that begins after the first segment, and no states before it.
TEST_P(Distributed, SequencesMayBeginAnywhere) {
  const int64_t lengths[] = {150, 60}, starts[] = {120, 3};
  Numbers numbers;
  numbers.lengths = {lengths, DType::kI64, {2}};
  numbers.starts = {starts, DType::kI64, {2}};
  Call call(GetParam(), DType::kF64, 150, 12);
  call.initial = {};
  if (GetParam().name != "rg_lru") {
    ExpectNear(call, Divided(call, {70, 80}, {.segment = 64}, numbers), Single(call, numbers), 1e-11, "starts");
    return;
  }
  // The first token of a sequence without an initial state differs from one after a state of zeros.
  const Passes passes = PassesOf("rg_lru");
  LocalRanks ranks(2);
  for (const std::exception_ptr& error : ranks.Run([&](const Group& group) {
         Context ctx(1);
         const int64_t begin = group.rank() * 75;
         const auto tensors = call.Tokens(begin, begin + 75);
         passes.forward(ctx, group, {tensors}, numbers, {call.o.view().Slice(1, begin, begin + 75)}, {});
       })) {
    ASSERT_TRUE(error);
    EXPECT_THROW(std::rethrow_exception(error), Unsupported);
  }
}

// Packed sequences: one ends and one begins within each part, and one has no tokens.
TEST(DistributedStates, OfPackedSequencesAreOnePerSequence) {
  const int64_t offsets[] = {0, 60, 60, 90, 150};
  for (const char* const name : {"gla", "gated_delta_rule", "mlstm", "selective_scan", "causal_conv1d"}) {
    const Passes passes = PassesOf(name);
    const Call call(*std::ranges::find(Mechanisms(), name, &Mechanism::name), DType::kF64, 150, 13);
    Numbers numbers;
    numbers.cu_seqlens = {offsets, DType::kI64, {5}};
    const auto first = [](std::vector<ConstTensorView> tensors, const Table& table) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].present() && table.tensors[i].over_tokens()) tensors[i] = tensors[i].Slice(0, 0, 1);
      }
      return tensors;
    };
    StateBuffers expected, got;
    for (const StateTensor& state : call.m.table.states) {
      AxisSizes sizes = call.sizes;
      sizes.B = 4;
      expected.buffers.emplace_back(DType::kF64, ShapeOf(state.axes, sizes));
      got.buffers.emplace_back(DType::kF64, ShapeOf(state.axes, sizes));
    }
    const Buffer o = call.Output();
    const auto whole = first(call.Tokens(0, 150), call.m.table);
    const auto final = expected.views();
    Context one(1);
    passes.single_forward(one, {whole}, numbers, {call.o.view().Slice(0, 0, 1), final});
    LocalRanks ranks(2);
    ExpectNone(ranks.Run([&](const Group& group) {
      Context ctx(1);
      const int64_t begin = group.rank() * 75;
      const std::vector<TensorView> states = got.views();
      const auto tensors = first(call.Tokens(begin, begin + 75), call.m.table);
      passes.forward(ctx, group, {tensors}, numbers,
                     {o.view().Slice(0, 0, 1).Slice(call.OutputAxis(), begin, begin + 75),
                      group.rank() == 1 ? StateViews(states) : StateViews()},
                     {.segment = 64});
    }));
    EXPECT_LE(Difference(o.view().Slice(0, 0, 1), call.o.view().Slice(0, 0, 1)), 1e-11) << name;
    const StateBuffers a = Absolute(call.m, got), b = Absolute(call.m, expected);
    for (size_t i = 0; i < a.buffers.size(); ++i) {
      EXPECT_LE(Difference(a.buffers[i].view(), b.buffers[i].view()), 1e-11) << name;
    }
  }
}

TEST_P(Distributed, BitsFollowFromTheCutsAlone) {
  const Call call(GetParam(), DType::kF32, 150, 9);
  const SequenceOptions options = {.segment = 64};
  const Whole expected = Divided(call, {150}, options);
  if (GetParam().name != "h3") {  // which is relayed, so that there are no segments
    ExpectBits(call, Divided(call, {64, 86}, options), expected, true, "two ranks");
    ExpectBits(call, Divided(call, {64, 64, 22}, options), expected, true, "three ranks");
  }
  const Whole kept = Divided(call, {64, 86}, options, {}, true);
  ExpectBits(call, kept, Divided(call, {64, 86}, options), true, "kept states");
}

TEST_P(Distributed, ARelayHasTheBitsOfOneProcess) {
  const std::string name = GetParam().name;
  if (name == "h3" || name == "s4d") GTEST_SKIP() << "agrees up to rounding, as any split does";
  const Call call(GetParam(), DType::kF32, 150, 10);
  const Whole expected = Single(call), got = Divided(call, {64, 86}, {.relay = true});
  ExpectBits(call, got, expected, false, "relay");
  ExpectNear(call, got, expected, 2e-4, "relay");
}

INSTANTIATE_TEST_SUITE_P(All, Distributed, testing::ValuesIn(Mechanisms()),
                         [](const testing::TestParamInfo<Mechanism>& of) { return of.param.name; });

// A call of gla, one part of which another rank changes.
struct Gla {
  Gla() : call(*std::ranges::find(Mechanisms(), "gla", &Mechanism::name), DType::kF32, 20, 11) {}
  gla::Inputs Inputs(const Group& group) const {
    const auto tokens = call.Tokens(group.rank() * 10, group.rank() * 10 + 10);
    return {{tokens[0], tokens[1], tokens[2], tokens[3]}, {}};
  }
  TensorView Output(const Group& group) const {
    return call.o.view().Slice(1, group.rank() * 10, group.rank() * 10 + 10);
  }
  Call call;
};

// Calls f on two ranks, and expects that both throw `what` before anything is computed or sent.
template <class F>
void ExpectRefused(const Gla& of, const F& f, const std::string& what) {
  LocalRanks ranks(2);
  const auto errors = ranks.Run([&](const Group& group) {
    Context ctx(1);
    f(ctx, group);
  });
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error) << what;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& thrown) {
      EXPECT_NE(std::string(thrown.what()).find(what), std::string::npos) << thrown.what();
    }
  }
  EXPECT_LE(ranks.num_calls(), 2 * 6) << "three all-gathers: numbers, and two of texts";
  EXPECT_TRUE(std::isnan(GetElement(of.call.o.view(), Shape{0, 0, 0, 0}))) << "nothing is written";
}

TEST(DistributedErrors, EveryRankRefusesCallsThatDiffer) {
  const Gla of;
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        gla::Options options;
        if (group.rank() == 1) options.scale = 2;
        Forward(ctx, group, of.Inputs(group), options, {of.Output(group), {}});
      },
      "rank 1 calls gla::Forward");
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        Forward(ctx, group, of.Inputs(group), {}, {of.Output(group), {}}, {.segment = 64 + group.rank()});
      },
      "segment=65");
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        const gla::Inputs in = of.Inputs(group);
        if (group.rank() == 0) return Forward(ctx, group, in, {}, {of.Output(group), {}});
        Forward(ctx, group, hgrn2::Inputs{{in.q, in.log_decay, in.v}, {}}, {}, {of.Output(group), {}});
      },
      "rank 1 calls hgrn2::Forward");
}

TEST(DistributedErrors, EveryRankRefusesWhatOneRefuses) {
  const Gla of;
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        gla::Inputs in = of.Inputs(group);
        if (group.rank() == 1) in.k = in.k.Slice(3, 0, 4);
        Forward(ctx, group, in, {}, {of.Output(group), {}});
      },
      "gla::Forward: k has shape [2,0,2,4]");
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        gla::Inputs in = of.Inputs(group);
        if (group.rank() == 1) in.v = in.v.Slice(1, 0, 4);
        Forward(ctx, group, in, {}, {of.Output(group), {}});
      },
      "v has shape [2,4,4,12], expected 10 tokens as in q");
  const Buffer positive(DType::kF32, of.call.Tokens(0, 10)[3].sizes());
  positive.FillConstant(0.5);
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        gla::Inputs in = of.Inputs(group);
        if (group.rank() == 1) in.log_decay = positive.view();
        ctx.set_checks(true);
        Forward(ctx, group, in, {}, {of.Output(group), {}});
      },
      "log_decay has an element 0.500000, expected <= 0 everywhere");
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        gla::Inputs in = of.Inputs(group);
        in.initial.S = of.call.initial.buffers[0].view();
        Forward(ctx, group, in, {}, {of.Output(group), {}});
      },
      "the initial state is given on rank 1, expected none but on rank 0");
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        Forward(ctx, group, of.Inputs(group), {}, {of.Output(group), {of.call.o.view()}});
      },
      "final.S is f32 [2,20,4,12], expected f32 [2,4,20,12]");
  ExpectRefused(
      of,
      [&](Context& ctx, const Group& group) {
        const gla::Inputs in = of.Inputs(group);
        linear_attention::Options options;
        options.causal = false;
        Forward(ctx, group, linear_attention::Inputs{{in.q, in.k, in.v}, {}}, options, {of.Output(group), {}});
      },
      "causal is false");
}

TEST(DistributedStates, GoToAnyRankAndGradientsAreSummed) {
  const Gla of;
  const Call& call = of.call;
  const StateBuffers expected = call.States(), got = call.States(), zero = call.States();
  const Buffer expected_q(DType::kF32, call.tensors[0].view().sizes()), q(DType::kF32, call.tensors[0].view().sizes());
  const Buffer twice(DType::kF32, call.d_final.buffers[0].view().sizes());
  ForEach(twice.view(),
          [&](const Shape& at) { SetElement(twice.view(), at, 2 * GetElement(call.d_final.buffers[0].view(), at)); });
  Context one(1);
  const auto tokens = call.Tokens(0, 20);
  const gla::Inputs in = {{tokens[0], tokens[1], tokens[2], tokens[3]}, {}};
  gla::Forward(one, in, {}, {call.o.view(), {expected.buffers[0].view()}});
  gla::BackwardInputs backward;
  static_cast<gla::Inputs&>(backward) = in;
  backward.d_o = call.d_o.view();
  backward.d_final.S = twice.view();
  gla::Gradients gradients;
  gradients.q = expected_q.view();
  gla::Backward(one, backward, {}, gradients);
  LocalRanks ranks(2);
  ExpectNone(ranks.Run([&](const Group& group) {
    Context ctx(1);
    gla::Outputs out{of.Output(group), {}};
    if (group.rank() == 0) out.final.S = got.buffers[0].view();  // the last tokens are rank 1's
    Forward(ctx, group, of.Inputs(group), {}, out);
    gla::BackwardInputs here;
    static_cast<gla::Inputs&>(here) = of.Inputs(group);
    here.d_o = call.d_o.view().Slice(1, group.rank() * 10, group.rank() * 10 + 10);
    here.d_final.S = call.d_final.buffers[0].view();  // on both
    gla::Gradients of_q;
    of_q.q = q.view().Slice(1, group.rank() * 10, group.rank() * 10 + 10);
    Backward(ctx, group, here, {}, of_q);
  }));
  EXPECT_LE(Difference(got.buffers[0].view(), expected.buffers[0].view()), 1e-6);
  EXPECT_LE(Difference(q.view(), expected_q.view()), 1e-5);
}

TEST(DistributedGroup, OfOneProcessNeedsNoTransport) {
  const Gla of;
  const Call& call = of.call;
  const Buffer o = call.Output();
  Context ctx(1);
  const auto tokens = call.Tokens(0, 20);
  const gla::Inputs in = {{tokens[0], tokens[1], tokens[2], tokens[3]}, {}};
  gla::Forward(ctx, in, {}, {call.o.view(), {}});
  Forward(ctx, Group(), in, {}, {o.view(), {}});
  EXPECT_TRUE(SameBits(o.view(), call.o.view()));
  EXPECT_THROW(Group({.self = nullptr, .rank = 0, .size = 2}), InvalidArgument);
  EXPECT_THROW(Group({.self = nullptr, .rank = 1, .size = 1}), InvalidArgument);
}

TEST(DistributedGroup, MayLeaveOutTheComparison) {
  const Gla of;
  int64_t calls[2];
  for (const bool checks : {true, false}) {
    LocalRanks ranks(2);
    ExpectNone(ranks.Run([&](Group group) {
      group.set_checks(checks);
      Context ctx(1);
      Forward(ctx, group, of.Inputs(group), {}, {of.Output(group), {}});
    }));
    calls[checks ? 1 : 0] = ranks.num_calls();
  }
  EXPECT_EQ(calls[0], calls[1]) << "numbers of tokens are sent anyway";
}

}  // namespace
}  // namespace heed
