// Calls that are computed in segments, against calls that are not, and against groups that cut at the same tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/distributed/distributed.h"
#include "heed/harness/buffer.h"
#include "heed/harness/unfair_executor.h"
#include "heed/mechanism/segments_internal.h"
#include "heed/ops/linear/efficient_attention/efficient_attention.h"
#include "tests/local_transport.h"
#include "tests/segments_call.h"

namespace heed {
namespace {

using namespace segments;  // NOLINT: of tests
using distributed::Group;
using distributed::LocalRanks;
using Numbers = recurrent::Options;  // lengths, starts, cu_seqlens, reverse and segment

struct Passes {
  std::function<void(Context&, const Arguments&, const Numbers&, const Results&)> forward, backward;
  // Passes of a group that has segments of 64 tokens.
  std::function<void(Context&, const Group&, const Arguments&, const Numbers&, const Results&)> group_forward,
      group_backward;
  std::function<mechanism::Explanation(const Context&, const Arguments&, const Numbers&)> explain;
};

Passes PassesOf(const std::string& name) {
#define HEED_PASSES(op)                                                                                      \
  if (name == #op) {                                                                                         \
    using Of = Lists<op::Structs>;                                                                           \
    const auto with = [](const Numbers& n) { return mechanism::With(segments::Own<op::Options>(), n); };     \
    return {[=](Context& c, const Arguments& in, const Numbers& n, const Results& out) {                     \
              op::Forward(c, Of::InputsOf(in), with(n), Of::OutputsOf(out));                                 \
            },                                                                                               \
            [=](Context& c, const Arguments& in, const Numbers& n, const Results& out) {                     \
              op::Backward(c, Of::InputsOf(in), with(n), Of::GradientsOf(out));                              \
            },                                                                                               \
            [=](Context& c, const Group& g, const Arguments& in, const Numbers& n, const Results& out) {     \
              distributed::Forward(c, g, Of::InputsOf(in), with(n), Of::OutputsOf(out), {.segment = 64});    \
            },                                                                                               \
            [=](Context& c, const Group& g, const Arguments& in, const Numbers& n, const Results& out) {     \
              distributed::Backward(c, g, Of::InputsOf(in), with(n), Of::GradientsOf(out), {.segment = 64}); \
            },                                                                                               \
            [=](const Context& c, const Arguments& in, const Numbers& n) {                                   \
              return op::Explain(c, Of::InputsOf(in), with(n));                                              \
            }};                                                                                              \
  }
  HEED_DISTRIBUTED_MECHANISMS(HEED_PASSES)
#undef HEED_PASSES
  throw InternalError(name);
}

// The results of both passes.
struct Computed {
  Computed(const Call& call, int64_t sequences) : o(call.Output()) {
    AxisSizes sizes = call.sizes;
    sizes.B = sequences;
    for (const StateTensor& state : call.m.table.states) {
      final.buffers.emplace_back(call.wide, ShapeOf(state.axes, sizes));
      d_initial.buffers.emplace_back(state.differentiable() ? Buffer(call.wide, ShapeOf(state.axes, sizes)) : Buffer());
    }
    for (const Buffer& t : call.tensors) {
      gradients.push_back(t.present() ? Buffer(t.view().dtype(), t.view().sizes()) : Buffer());
    }
  }
  Buffer o;
  StateBuffers final, d_initial;
  std::vector<Buffer> gradients;
};

// A way to run a call.
struct Run {
  Numbers numbers = {};
  int threads = 1;
  bool initial = true, one_batch = false, group = false;
};

Computed Compute(const Call& call, const Run& run, Context& ctx) {
  const Passes passes = PassesOf(call.m.name);
  const ConstTensorView& packed = run.numbers.cu_seqlens;
  Computed result(call, packed.present() ? packed.size(0) - 1 : call.sizes.B);
  const auto cut = [&](auto view, const Tensor& tensor) {
    return packed.present() && view.present() && tensor.over_tokens() ? view.Slice(0, 0, 1) : view;
  };
  std::vector<ConstTensorView> tensors = call.Tokens(0, call.sizes.T), initial, d_final;
  std::vector<TensorView> gradients;
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = cut(tensors[i], call.m.table.tensors[i]);
    gradients.push_back(cut(result.gradients[i].view(), call.m.table.tensors[i]));
  }
  if (run.initial && !packed.present()) {
    initial = call.initial.inputs();
    d_final = call.d_final.inputs();
    for (size_t i = 0; i < d_final.size(); ++i) {
      if (!call.m.table.states[i].differentiable()) d_final[i] = {};
    }
  }
  const Tensor& first = call.m.table.tensors[0];
  const auto final = result.final.views(), d_initial = result.d_initial.views();
  const Arguments in = {tensors, initial}, in_backward = {tensors, initial, cut(call.d_o.view(), first), d_final};
  const Results out = {cut(result.o.view(), first), final}, out_backward = {{}, d_initial, gradients};
  if (!run.group) {
    passes.forward(ctx, in, run.numbers, out);
    passes.backward(ctx, in_backward, run.numbers, out_backward);
    return result;
  }
  LocalRanks local(1);
  distributed::ExpectNone(local.Run([&](const Group& group) {
    passes.group_forward(ctx, group, in, run.numbers, out);
    passes.group_backward(ctx, group, in_backward, run.numbers, out_backward);
  }));
  return result;
}
Computed Compute(const Call& call, const Run& run) {
  Context ctx(run.threads);
  return Compute(call, run, ctx);
}

void ExpectNear(const Call& call, const Computed& got, const Computed& expected, double tolerance,
                const std::string& what) {
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
  for (size_t i = 0; i < got.d_initial.buffers.size(); ++i) {
    if (!got.d_initial.buffers[i].present()) continue;
    EXPECT_LE(Difference(got.d_initial.buffers[i].view(), expected.d_initial.buffers[i].view()), 10 * tolerance)
        << what << " d" << call.m.table.states[i].name;
  }
}

// With `sums`, gradients of tensors without tokens too.
void ExpectBits(const Call& call, const Computed& got, const Computed& expected, bool sums, const std::string& what) {
  EXPECT_TRUE(SameBits(got.o.view(), expected.o.view())) << what << " o";
  for (size_t i = 0; i < got.final.buffers.size(); ++i) {
    EXPECT_TRUE(SameBits(got.final.buffers[i].view(), expected.final.buffers[i].view()))
        << what << " " << call.m.table.states[i].name;
    if (!got.d_initial.buffers[i].present()) continue;
    EXPECT_TRUE(SameBits(got.d_initial.buffers[i].view(), expected.d_initial.buffers[i].view()))
        << what << " d" << call.m.table.states[i].name;
  }
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    if (!got.gradients[i].present() || (!sums && call.TokenAxis(call.m.table.tensors[i]) < 0)) continue;
    EXPECT_TRUE(SameBits(got.gradients[i].view(), expected.gradients[i].view()))
        << what << " d" << call.m.table.tensors[i].name;
  }
}

Numbers Segment(int64_t segment) {
  Numbers numbers;
  numbers.segment = segment;
  return numbers;
}

std::vector<Mechanism> Divisible() {
  std::vector<Mechanism> all = Mechanisms();
  std::erase_if(all, [](const Mechanism& m) { return m.name == "h3"; });
  return all;
}

class InSegments : public testing::TestWithParam<Mechanism> {
 protected:
  static double Tolerance(DType dtype) { return dtype == DType::kF64 ? 1e-11 : dtype == DType::kF32 ? 2e-4 : 0.02; }
};

// Four segments, two of which are summarised, the last of 22 tokens.
TEST_P(InSegments, HaveTheResultsOfTheWhole) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Call call(GetParam(), dtype, 214, 21);
    const std::string what = Name(dtype);
    ExpectNear(call, Compute(call, {Segment(64)}), Compute(call, {}), Tolerance(dtype), what);
    if (GetParam().name == "rg_lru") continue;
    ExpectNear(call, Compute(call, {.numbers = Segment(64), .initial = false}), Compute(call, {.initial = false}),
               Tolerance(dtype), what + ", without an initial state");
  }
}

TEST_P(InSegments, DoNotDependOnThreads) {
  const Call call(GetParam(), DType::kF32, 214, 22);
  const Computed expected = Compute(call, {Segment(64)});
  for (const int threads : {2, 3, 8}) {
    ExpectBits(call, Compute(call, {Segment(64), threads}), expected, true, std::to_string(threads) + " threads");
  }
  UnfairExecutor unfair(3, 29);
  Context ctx(unfair.executor());
  ExpectBits(call, Compute(call, {Segment(64)}, ctx), expected, true, "one thread does all tasks");
}

TEST_P(InSegments, HaveTheBitsOfAGroup) {
  if (GetParam().name == "s4d") GTEST_SKIP() << "its last segment is a convolution in a group, if no state is wanted";
  for (const bool reverse : {false, true}) {
    const Call call(GetParam(), DType::kF32, 214, 23);
    Numbers numbers = Segment(64), of_group;
    numbers.reverse = of_group.reverse = reverse;
    ExpectBits(call, Compute(call, {numbers}), Compute(call, {.numbers = of_group, .group = true}), false,
               reverse ? "reverse" : "forward");
  }
}

TEST_P(InSegments, ASequenceWithinASegmentIsTheWhole) {
  const Call call(GetParam(), DType::kF32, 150, 24);
  const bool modes = GetParam().name == "s4d";
  ExpectNear(call, Compute(call, {Segment(192)}), Compute(call, {}), 2e-4, "one segment");
  if (!modes) ExpectBits(call, Compute(call, {Segment(192)}), Compute(call, {}), true, "one segment");
}

// One sequence has segments of 64, 64 and 2 tokens, the other is within one; tokens outside are cleared.
TEST_P(InSegments, OfPaddedSequencesBeginWithTheirFirstTokens) {
  const int64_t lengths[] = {150, 40}, starts[] = {20, 3};
  const Call call(GetParam(), DType::kF64, 150, 25);
  for (const bool reverse : {false, true}) {
    Numbers numbers = Segment(64), whole;
    numbers.lengths = whole.lengths = {lengths, DType::kI64, {2}};
    numbers.starts = whole.starts = {starts, DType::kI64, {2}};
    numbers.reverse = whole.reverse = reverse;
    ExpectNear(call, Compute(call, {numbers}), Compute(call, {whole}), 1e-11, "padded");
  }
}

TEST_P(InSegments, OfPackedSequencesAreTheirOwn) {
  if (GetParam().name == "rg_lru") GTEST_SKIP() << "this test has no initial states";
  const int64_t offsets[] = {0, 70, 70, 140};
  const Call call(GetParam(), DType::kF64, 150, 26);
  Numbers numbers = Segment(64), whole;
  numbers.cu_seqlens = whole.cu_seqlens = {offsets, DType::kI64, {4}};
  const Computed got = Compute(call, {numbers}), expected = Compute(call, {whole});
  const ConstTensorView o = got.o.view().Slice(0, 0, 1);
  EXPECT_LE(Difference(o, expected.o.view().Slice(0, 0, 1)), 1e-11);
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    if (!got.gradients[i].present()) continue;
    const bool over_tokens = call.m.table.tensors[i].over_tokens();
    const ConstTensorView a = got.gradients[i].view(), b = expected.gradients[i].view();
    EXPECT_LE(Difference(over_tokens ? a.Slice(0, 0, 1) : a, over_tokens ? b.Slice(0, 0, 1) : b), 1e-10)
        << call.m.table.tensors[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, InSegments, testing::ValuesIn(Divisible()),
                         [](const testing::TestParamInfo<Mechanism>& of) { return of.param.name; });

// Four sequences of one call: padded rows, packed ones, and one without tokens.
class StatesAlone : public testing::TestWithParam<Mechanism> {
 protected:
  static constexpr mechanism::TokenRange kSequences[] = {{0, 0, 150}, {1, 3, 61}, {1, 61, 61}, {1, 70, 141}};
  static constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
};

// Final states of a call without an o, which also begins with those of another one.
TEST_P(StatesAlone, HaveTheBitsOfAWholePass) {
  const Mechanism& m = GetParam();
  const Passes passes = PassesOf(m.name);
  for (const auto& [dtype, amx] : std::vector<std::pair<DType, bool>>{{DType::kF64, false},
                                                                      {DType::kF32, false},
                                                                      {DType::kF16, false},
                                                                      {DType::kBF16, false},
                                                                      {DType::kBF16, true}}) {
    std::optional<EmulateAmx> emulated;
    if (amx) emulated.emplace();
    for (const bool column_decays : {false, true}) {
      if (column_decays && !m.table.Has(Role::kLogValueDecay)) continue;
      const Call call(m, dtype, 150, 31, column_decays);
      for (const bool reverse : {false, true}) {
        const mechanism::CutSequences cut = {{std::begin(kSequences), std::end(kSequences)}};
        Numbers numbers;
        numbers.reverse = reverse;
        numbers.cut = &cut;
        const std::vector<ConstTensorView> tensors = call.Tokens(0, 150);
        std::vector<ConstTensorView> initial;
        Computed whole(call, 4), alone(call, 4), before(call, 4);
        for (const char* what : {", without an initial state", ", with one"}) {
          Context ctx(3);
          ctx.set_isa("tiles");  // with AMX where it is emulated
          const auto of_whole = whole.final.views(), of_alone = alone.final.views();
          passes.forward(ctx, {tensors, initial}, numbers, {whole.o.view(), of_whole});
          passes.forward(ctx, {tensors, initial}, numbers, {{}, of_alone});
          for (size_t i = 0; i < of_whole.size(); ++i) {
            EXPECT_TRUE(SameBits(of_alone[i], of_whole[i]))
                << Name(dtype) << (amx ? " AMX" : "") << (reverse ? " reverse " : " ") << m.table.states[i].name
                << what;
          }
          before = whole;
          whole = Computed(call, 4);
          initial = before.final.inputs();
        }
      }
    }
  }
}

// Gradients of initial states without those of tensors.
TEST_P(StatesAlone, HaveTheGradientsOfAWholePass) {
  const Mechanism& m = GetParam();
  const Passes passes = PassesOf(m.name);
  for (const DType dtype : kDTypes) {
    for (const bool column_decays : {false, true}) {
      if (column_decays && !m.table.Has(Role::kLogValueDecay)) continue;
      const Call call(m, dtype, 150, 32, column_decays);
      for (const bool reverse : {false, true}) {
        Numbers numbers;
        numbers.reverse = reverse;
        const Computed whole(call, 2), alone(call, 2);
        const std::vector<ConstTensorView> tensors = call.Tokens(0, 150), initial = call.initial.inputs();
        std::vector<ConstTensorView> d_final = call.d_final.inputs();
        std::vector<TensorView> gradients;
        for (size_t i = 0; i < d_final.size(); ++i) {
          if (!m.table.states[i].differentiable()) d_final[i] = {};
        }
        for (const Buffer& t : whole.gradients) gradients.push_back(t.view());
        const auto of_whole = whole.d_initial.views(), of_alone = alone.d_initial.views();
        Context ctx(3);
        const Arguments in = {tensors, initial, call.d_o.view(), d_final};
        passes.backward(ctx, in, numbers, {{}, of_whole, gradients});
        passes.backward(ctx, in, numbers, {{}, of_alone, {}});
        for (size_t i = 0; i < of_whole.size(); ++i) {
          if (!of_whole[i].present()) continue;
          EXPECT_TRUE(SameBits(of_alone[i], of_whole[i]))
              << Name(dtype) << (reverse ? " reverse d" : " d") << m.table.states[i].name;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, StatesAlone, testing::ValuesIn(Mechanisms()),
                         [](const testing::TestParamInfo<Mechanism>& of) { return of.param.name; });

// Without a normaliser or decays, with heads whose columns are divided among threads.
TEST(StatesAloneOfParts, HaveTheBitsOfAWholePass) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t columns : {64, 100}) {
      const Buffer q(dtype, {1, 200, 1, 68}), k(dtype, {1, 200, 1, 68}), dq(dtype, {1, 200, 1, 68});
      const Buffer v(dtype, {1, 200, 1, columns}), d_o(dtype, {1, 200, 1, columns}), o(dtype, {1, 200, 1, columns});
      const Shape of_state = {1, 1, 68, columns};
      const Buffer state(DType::kF32, of_state), whole(DType::kF32, of_state), alone(DType::kF32, of_state);
      const Buffer d_whole(DType::kF32, of_state), d_alone(DType::kF32, of_state);
      for (int seed = 33; const Buffer& x : {q, k, v, d_o, state}) x.FillNormal(static_cast<uint64_t>(seed++));
      const mechanism::CutSequences cut = {{{0, 0, 200}}};
      linear_attention::Options options;
      options.normalize = false;
      options.cut = &cut;
      for (const int threads : {1, 2, 4}) {
        Context ctx(threads);
        linear_attention::BackwardInputs in;
        in.q = q.view(), in.k = k.view(), in.v = v.view(), in.initial.S = state.view(), in.d_o = d_o.view();
        linear_attention::Forward(ctx, in, options, {o.view(), {whole.view()}});
        linear_attention::Forward(ctx, in, options, {{}, {alone.view()}});
        EXPECT_TRUE(SameBits(alone.view(), whole.view())) << Name(dtype) << " " << threads << " threads";
        linear_attention::Gradients all, none;
        all.q = dq.view(), all.initial.S = d_whole.view(), none.initial.S = d_alone.view();
        linear_attention::Backward(ctx, in, options, all);
        linear_attention::Backward(ctx, in, options, none);
        EXPECT_TRUE(SameBits(d_alone.view(), d_whole.view())) << Name(dtype) << " " << threads << " threads";
      }
    }
  }
}

TEST(StatesAloneErrors, OnlyCallsOfHeedHaveNoOutputs) {
  const Call call(*std::ranges::find(Mechanisms(), "gla", &Mechanism::name), DType::kF32, 70, 34);
  const Passes passes = PassesOf("gla");
  const Computed result(call, 2);
  const auto tensors = call.Tokens(0, 70);
  const auto final = result.final.views();
  Context ctx(1);
  for (const int64_t segment : {0, 64, 128}) {
    EXPECT_THROW(passes.forward(ctx, {tensors}, Segment(segment), {{}, final}), InvalidArgument) << segment;
  }
  const mechanism::CutSequences cut = {{{0, 0, 70}}};
  Numbers numbers;
  numbers.cut = &cut;
  EXPECT_THROW(passes.forward(ctx, {tensors}, numbers, {}), InvalidArgument) << "nothing is wanted";
}

const Mechanism& Named(const char* name) { return *std::ranges::find(Mechanisms(), name, &Mechanism::name); }

// Throws the error of a call, which has written nothing.
void ExpectRefused(const char* name, const Run& run, const std::string& what) {
  const Call call(Named(name), DType::kF32, 150, 27);
  const Passes passes = PassesOf(name);
  const auto tensors = call.Tokens(0, 150), initial = call.initial.inputs();
  const Buffer o = call.Output();
  o.FillConstant(7);
  Context ctx(1);
  try {
    passes.forward(ctx, {tensors, run.initial ? std::span(initial) : std::span<const ConstTensorView>()}, run.numbers,
                   {o.view()});
    ADD_FAILURE() << name << ": " << what;
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
  }
  ForEach(o.view(), [&](const Shape& at) { ASSERT_EQ(GetElement(o.view(), at), 7) << "written"; });
}

TEST(InSegmentsErrors, AreSaidBeforeAnythingIsWritten) {
  ExpectRefused("gla", {Segment(100)}, "gla::Forward: segment is 100, expected 0 or a multiple of 64");
  ExpectRefused("gla", {Segment(-64)}, "segment is -64");
  ExpectRefused("h3", {Segment(64)}, "h3::Forward: segment is 64, expected 0 as its state depends on the keys before");
  ExpectRefused("rg_lru", {.numbers = Segment(64), .initial = false}, "expected 0 without an initial state");
  const int64_t lengths[] = {151, 40};
  Numbers numbers = Segment(64);
  numbers.lengths = {lengths, DType::kI64, {2}};
  ExpectRefused("gla", {numbers}, "gla::Forward: lengths[0] is 151");
  const Buffer x(DType::kF32, {1, 128, 1, 4});
  x.FillNormal(28);
  const Buffer o(DType::kF32, {1, 128, 1, 4});
  efficient_attention::Options options;
  options.segment = 64;
  Context ctx(1);
  EXPECT_THROW(efficient_attention::Forward(ctx, {{x.view(), x.view(), x.view()}, {}}, options, {o.view(), {}}),
               Unsupported);
}

// One head of 64 channels, 64 segments: the ideal is the counted work divided by the threads.
TEST(InSegmentsByCount, ThreadsAreBusy) {
  const std::vector<mechanism::TokenRange> ranges = {{0, 0, 64 * 1024}};
  for (const auto& [states, transition] : {std::pair(0.5, 0.125), {0.75, 0.75}}) {  // of decays and of RWKV-7
    const mechanism::Division head = {1, 2, states, transition};
    const double whole = mechanism::CountedWork(ranges, head, 0);
    EXPECT_EQ(whole, 64 * 1024);
    EXPECT_EQ(mechanism::CountedWork(ranges, head, 1024), 1024 * (63 * states + 62 * transition + 64));
    EXPECT_EQ(mechanism::CountedTime(ranges, head, 0, 1), 1);
    EXPECT_EQ(mechanism::CountedTime(ranges, head, 0, 64), 0.5) << "two parts of columns";
    for (const int64_t threads : {8, 64}) {
      const double ideal = mechanism::CountedWork(ranges, head, 1024) / whole / static_cast<double>(threads);
      EXPECT_LE(mechanism::CountedTime(ranges, head, 1024, threads), ideal / 0.9) << threads;
    }
  }
}

TEST(InSegmentsByCount, ExplainSaysWhatItCosts) {
  const auto why = [](int64_t heads, int64_t segment, int threads) {
    const ConstTensorView x(nullptr, DType::kF32, {1, 65536, heads, 64});
    const std::vector<ConstTensorView> tensors = {x, x, x, x};
    return PassesOf("gla").explain(Context(threads), {tensors}, Segment(segment)).why;
  };
  EXPECT_NE(why(1, 4096, 8).find(", in segments of 4096 tokens: 1.6 times the work, by count 2.5 times as fast on 8"),
            std::string::npos)
      << why(1, 4096, 8);
  EXPECT_NE(why(1, 4096, 8).find("faster from 4 threads on"), std::string::npos) << why(1, 4096, 8);
  EXPECT_NE(why(1, 0, 8).find(", segment=4096 would be by count 2.5 times as fast on 8 threads"), std::string::npos)
      << why(1, 0, 8);
  EXPECT_EQ(why(1, 0, 2).find("segment"), std::string::npos) << why(1, 0, 2);
  EXPECT_EQ(why(8, 0, 8).find("segment"), std::string::npos) << why(8, 0, 8);
  EXPECT_THROW(why(1, 100, 1), InvalidArgument);
}

}  // namespace
}  // namespace heed
