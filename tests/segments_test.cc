// Segments of tokens as maps of states: a sequence that is cut, summarised, and composed again has the states, outputs
// and gradients of the whole one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "tests/segments_call.h"

namespace heed {
namespace {

using namespace segments;  // NOLINT: of this file

void ExpectStates(const Mechanism& m, const StateBuffers& got, const StateBuffers& expected, double tolerance,
                  const std::string& what) {
  const StateBuffers a = Absolute(m, got), b = Absolute(m, expected);
  for (size_t i = 0; i < a.buffers.size(); ++i) {
    EXPECT_LE(Difference(a.buffers[i].view(), b.buffers[i].view()), tolerance) << what << " " << m.table.states[i].name;
  }
}

class Segments : public testing::TestWithParam<Mechanism> {
 protected:
  static double Tolerance(DType dtype) { return dtype == DType::kF64 ? 1e-11 : 2e-4; }
  SummaryBuffers Summarized(const Call& call, int64_t begin, int64_t end) {
    const SummaryBuffers summary = call.Summary();
    const std::vector<ConstTensorView> tensors = call.Tokens(begin, end), tail = TailBefore(call, begin);
    call.m.summarize(ctx_, {tensors, tail}, summary);
    return summary;
  }
  // The last inputs before a token, where the state depends on them.
  std::vector<ConstTensorView> TailBefore(const Call& call, int64_t token) {
    if (call.m.table.states[0].role != StateTensor::kTail) return {};
    tails_.push_back(call.States());
    const std::vector<ConstTensorView> tensors = call.Tokens(0, token), initial = call.initial.inputs();
    const std::vector<TensorView> views = tails_.back().views();
    const Buffer o(call.dtype, call.o.view().Slice(call.OutputAxis(), 0, token).sizes());
    call.m.forward(ctx_, {tensors, initial}, {o.view(), views});
    return {views[0]};
  }
  SummaryBuffers Composed(const Call& call, const SummaryBuffers& left, const SummaryBuffers& right) {
    const SummaryBuffers both = call.Summary();
    call.m.compose(left, right, both);
    return both;
  }
  StateBuffers After(const Call& call, const SummaryBuffers& segment, const StateBuffers& before) {
    const StateBuffers after = call.States();
    call.m.apply(segment, before.views(), after.views());
    return after;
  }
  StateBuffers Final(const Call& call) {
    const StateBuffers final = call.States();
    const std::vector<ConstTensorView> tensors = call.Tokens(0, call.sizes.T), initial = call.initial.inputs();
    const std::vector<TensorView> views = final.views();
    call.m.reference(ctx_, {tensors, initial}, {call.o.view(), views});
    return final;
  }
  Context ctx_{2};
  std::vector<StateBuffers> tails_;
};

// Cut anywhere, at a block of 64 tokens or not, a segment of one token and one without tokens among them.
TEST_P(Segments, ComposeToTheStatesOfTheWhole) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Call call(GetParam(), dtype, 150, 1);
    const StateBuffers expected = Final(call);
    for (const Shape& cuts : {Shape{64, 128}, Shape{1, 1}, Shape{2, 97}, Shape{149, 150}}) {
      const SummaryBuffers a = Summarized(call, 0, cuts[0]), b = Summarized(call, cuts[0], cuts[1]);
      const SummaryBuffers c = Summarized(call, cuts[1], 150);
      const std::string what = std::string(Name(dtype)) + " cut at " + ShapeString(cuts);
      const double tolerance = Tolerance(dtype);
      ExpectStates(call.m, After(call, c, After(call, b, After(call, a, call.initial))), expected, tolerance, what);
      ExpectStates(call.m, After(call, Composed(call, Composed(call, a, b), c), call.initial), expected, tolerance,
                   what + ", the first two composed first");
      ExpectStates(call.m, After(call, Composed(call, a, Composed(call, b, c)), call.initial), expected, tolerance,
                   what + ", the last two composed first");
    }
  }
}

// Each segment computes its outputs and gradients from the states before it and the gradients of those after it.
TEST_P(Segments, HaveTheOutputsAndGradientsOfTheWhole) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const Call call(GetParam(), dtype, 150, 2);
    const Mechanism& m = call.m;
    const int64_t T = call.sizes.T, cut = 70;
    const double tolerance = Tolerance(dtype);
    const auto states = call.initial.inputs(), whole = call.Tokens(0, T);
    const auto gradients_of = [&](StateBuffers& buffers) {
      std::vector<TensorView> views = buffers.views();
      for (size_t i = 0; i < views.size(); ++i) {
        if (!m.table.states[i].differentiable()) views[i] = {};
      }
      return views;
    };
    StateBuffers d_final = call.d_final, d_initial = call.States();
    const std::vector<TensorView> d_last = gradients_of(d_final), d_first = gradients_of(d_initial);
    const std::vector<ConstTensorView> d_last_inputs(d_last.begin(), d_last.end());
    m.forward(ctx_, {whole, states}, {call.o.view()});
    m.backward(ctx_, {whole, states, call.d_o.view(), d_last_inputs}, {{}, d_first});

    const SummaryBuffers left = Summarized(call, 0, cut), right = Summarized(call, cut, T);
    const StateBuffers between = After(call, left, call.initial);
    const auto tokens = call.Tokens(cut, T), between_inputs = between.inputs();
    const ConstTensorView o = call.o.view();
    const Buffer o_right(dtype, o.Slice(call.OutputAxis(), cut, T).sizes());
    m.forward(ctx_, {tokens, between_inputs}, {o_right.view()});
    EXPECT_LE(Difference(o_right.view(), o.Slice(call.OutputAxis(), cut, T)), tolerance) << Name(dtype) << " o";

    StateBuffers d_between = call.States(), d_got = call.States();
    const std::vector<TensorView> d_middle = gradients_of(d_between), d_begin = gradients_of(d_got);
    const ConstTensorView d_o = call.d_o.view();
    m.backward(ctx_, {tokens, between_inputs, d_o.Slice(call.OutputAxis(), cut, T)}, {{}, d_middle});
    m.apply_backward(right, between.views(), d_last, d_middle);
    m.backward(ctx_, {call.Tokens(0, cut), states, d_o.Slice(call.OutputAxis(), 0, cut)}, {{}, d_begin});
    m.apply_backward(left, call.initial.views(), d_middle, d_begin);
    for (size_t i = 0; i < d_first.size(); ++i) {
      // Only Backward with d_final has the gradient of the part of S that comes from a tail.
      if (!d_first[i].present() || m.table.states[i].role == StateTensor::kTail) continue;
      EXPECT_LE(Difference(d_begin[i], d_first[i]), tolerance) << Name(dtype) << " d" << m.table.states[i].name;
    }
  }
}

TEST_P(Segments, MayBeWrittenInPlace) {
  const Call call(GetParam(), DType::kF64, 40, 3);
  const SummaryBuffers a = Summarized(call, 0, 30), b = Summarized(call, 30, 40);
  const StateBuffers expected = After(call, Composed(call, a, b), call.initial);
  call.m.compose(a, b, b);
  call.m.apply(b, call.initial.views(), call.initial.views());
  ExpectStates(call.m, call.initial, expected, 0, "in place");
}

TEST_P(Segments, RefuseBadArguments) {
  const Call call(GetParam(), DType::kF32, 8, 4);
  const auto tensors = call.Tokens(0, 8), initial = call.initial.inputs();
  const SummaryBuffers summary = Summarized(call, 0, 8);
  EXPECT_THROW(call.m.summarize(ctx_, {tensors, initial}, summary), InvalidArgument) << "an initial state";
  EXPECT_THROW(call.m.summarize(ctx_, {}, summary), InvalidArgument) << "no tensors";
  EXPECT_THROW(call.m.summarize(ctx_, {tensors}, {}), InvalidArgument) << "no states";
  const std::vector<TensorView> states = summary.state.views();
  EXPECT_THROW(call.m.summarize(ctx_, {tensors}, Segment{states, {}}), InvalidArgument) << "no transition";
  EXPECT_THROW(call.m.apply(Segment{states, {}}, states, states), InvalidArgument) << "no transition";
  const TensorView in_place(const_cast<void*>(tensors[0].data()), states[0].dtype(), states[0].sizes());
  std::vector<TensorView> overlapping = states;
  overlapping[0] = in_place;
  const std::vector<TensorView> transitions = summary.transition.views();
  EXPECT_THROW(call.m.summarize(ctx_, {tensors}, Segment{overlapping, transitions}), InvalidArgument) << "an overlap";
  const Call other(GetParam(), DType::kF64, 8, 4);
  EXPECT_THROW(call.m.compose(summary, Summarized(other, 0, 8), summary), InvalidArgument) << "dtypes";
}

INSTANTIATE_TEST_SUITE_P(All, Segments, testing::ValuesIn(Mechanisms()),
                         [](const testing::TestParamInfo<Mechanism>& of) { return of.param.name; });

// Columns that decay make the transition as large as the state.
TEST(SegmentsOfGla, HaveDecaysOfColumns) {
  const Mechanism& gla = *std::ranges::find(Mechanisms(), "gla", &Mechanism::name);
  const Call call(gla, DType::kF64, 100, 5, true);
  Context ctx(1);
  const StateBuffers expected = call.States(), got = call.States();
  const auto whole = call.Tokens(0, 100), initial = call.initial.inputs();
  const auto views = expected.views();
  gla.reference(ctx, {whole, initial}, {call.o.view(), views});
  const SummaryBuffers a = call.Summary(), b = call.Summary();
  gla.summarize(ctx, {call.Tokens(0, 33)}, a);
  gla.summarize(ctx, {call.Tokens(33, 100)}, b);
  gla.compose(a, b, a);
  gla.apply(a, call.initial.views(), got.views());
  EXPECT_LE(Difference(got.buffers[0].view(), expected.buffers[0].view()), 1e-12);
}

}  // namespace
}  // namespace heed
