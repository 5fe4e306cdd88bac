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
#include "heed/ops/delta/comba/comba_internal.h"
#include "heed/ops/delta/delta_product/delta_product_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"
#include "heed/ops/delta/gdn2/gdn2_internal.h"
#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"
#include "heed/ops/gated/gla/gla_internal.h"
#include "heed/ops/gated/hgrn/hgrn_internal.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "heed/ops/gated/lightning/lightning_internal.h"
#include "heed/ops/gated/mlstm/mlstm_internal.h"
#include "heed/ops/gated/retention/retention_internal.h"
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"
#include "heed/ops/gated/rwkv5/rwkv5_internal.h"
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"
#include "heed/ops/gated/simple_gla/simple_gla_internal.h"
#include "heed/ops/linear/based/based_internal.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "heed/ops/linear/performer/performer_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"
#include "heed/ops/ssm/h3/h3_internal.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"
#include "tests/call_views.h"

namespace heed {
namespace {

using mechanism::Arguments;
using mechanism::AxisSizes;
using mechanism::Functions;
using mechanism::Lists;
using mechanism::Results;
using mechanism::Role;
using mechanism::Segment;
using mechanism::ShapeOf;
using mechanism::StateTensor;
using mechanism::StateViews;
using mechanism::Table;
using mechanism::TableOf;
using mechanism::Tensor;
using Shape = std::vector<int64_t>;

struct Mechanism {
  std::string name;
  Table table;
  std::function<void(Context&, const Arguments&, const Results&)> forward, backward, reference;
  std::function<void(Context&, const Arguments&, const Segment&)> summarize;
  std::function<void(const Segment&, const Segment&, const Segment&)> compose;
  std::function<void(const Segment&, StateViews, StateViews)> apply;
  std::function<void(const Segment&, StateViews, StateViews, StateViews)> apply_backward;
};
void PrintTo(const Mechanism& m, std::ostream* os) { *os << m.name; }

template <class Structs>
typename Structs::State StateOf(StateViews views) {
  return Lists<Structs>::OutputsOf({{}, views}).final;
}

template <class Structs, class Options>
Mechanism Bound(const std::string& name, const Table& table, const Options& options,
                const Functions<Structs, Options>& f) {
  using Of = Lists<Structs>;
  return {
      name,
      table,
      [=](Context& ctx, const Arguments& in, const Results& out) { f.Forward(ctx, in, options, out); },
      [=](Context& ctx, const Arguments& in, const Results& out) { f.Backward(ctx, in, options, out); },
      [=](Context&, const Arguments& in, const Results& out) {
        f.reference(Of::InputsOf(in), options, Of::OutputsOf(out));
      },
      [=](Context& ctx, const Arguments& in, const Segment& out) {
        f.summarize(ctx, Of::InputsOf(in), options, Of::SummaryOf(out));
      },
      [=](const Segment& left, const Segment& right, const Segment& out) {
        f.compose(Of::SummaryOf(left), Of::SummaryOf(right), Of::SummaryOf(out));
      },
      [=](const Segment& segment, StateViews before, StateViews after) {
        f.apply(Of::SummaryOf(segment), StateOf<Structs>(before), StateOf<Structs>(after));
      },
      [=](const Segment& segment, StateViews before, StateViews d_after, StateViews d_before) {
        f.apply_backward(Of::SummaryOf(segment), StateOf<Structs>(before), StateOf<Structs>(d_after),
                         StateOf<Structs>(d_before));
      },
  };
}

// The functions of a mechanism without options, or with its `own`.
#define HEED_SEGMENTED(op, own)                                                                           \
  [] {                                                                                                    \
    using namespace op; /* NOLINT: for the names in HEED_FUNCTIONS */                                     \
    return Bound<op::Structs, op::Options>(#op, TableOf(op::kTensors, op::kStates), own, HEED_FUNCTIONS); \
  }()

performer::Options Causal() {
  performer::Options options;
  options.causal = true;
  return options;
}
linear_attention::Options Normalized() {
  linear_attention::Options options;
  options.causal = true;
  options.normalize = true;
  return options;
}
selective_scan::Options Softplus() {
  selective_scan::Options options;
  options.delta_softplus = true;
  return options;
}

const std::vector<Mechanism>& Mechanisms() {
  static const std::vector<Mechanism> all = {
      HEED_SEGMENTED(linear_attention, Normalized()),
      HEED_SEGMENTED(performer, Causal()),
      HEED_SEGMENTED(based, based::Options()),
      HEED_SEGMENTED(retention, retention::Options()),
      HEED_SEGMENTED(lightning, lightning::Options()),
      HEED_SEGMENTED(simple_gla, simple_gla::Options()),
      HEED_SEGMENTED(gla, gla::Options()),
      HEED_SEGMENTED(hgrn2, hgrn2::Options()),
      HEED_SEGMENTED(mlstm, mlstm::Options()),
      HEED_SEGMENTED(rwkv4, rwkv4::Options()),
      HEED_SEGMENTED(rwkv5, rwkv5::Options()),
      HEED_SEGMENTED(rwkv6, rwkv6::Options()),
      HEED_SEGMENTED(delta_rule, delta_rule::Options()),
      HEED_SEGMENTED(gated_delta_rule, gated_delta_rule::Options()),
      HEED_SEGMENTED(kda, kda::Options()),
      HEED_SEGMENTED(gdn2, gdn2::Options()),
      HEED_SEGMENTED(comba, comba::Options()),
      HEED_SEGMENTED(delta_product, delta_product::Options()),
      HEED_SEGMENTED(rwkv7, rwkv7::Options()),
      HEED_SEGMENTED(ssd, ssd::Options()),
      HEED_SEGMENTED(hgrn, hgrn::Options()),
      HEED_SEGMENTED(rg_lru, rg_lru::Options()),
      HEED_SEGMENTED(selective_scan, Softplus()),
      HEED_SEGMENTED(s4d, s4d::Options()),
      HEED_SEGMENTED(h3, h3::Options()),
      HEED_SEGMENTED(causal_conv1d, causal_conv1d::Options()),
  };
  return all;
}

void ForEach(const ConstTensorView& t, const std::function<void(const Shape&)>& f) {
  Shape index(t.sizes().size());
  if (t.num_elements() == 0) return;
  do {
    f(index);
  } while (NextIndex(t.sizes(), index));
}

// Buffers of states, and their views.
struct StateBuffers {
  std::vector<Buffer> buffers;
  std::vector<TensorView> views() const {
    std::vector<TensorView> views;
    for (const Buffer& buffer : buffers) views.push_back(buffer.view());
    return views;
  }
  std::vector<ConstTensorView> inputs() const {
    const std::vector<TensorView> of = views();
    return {of.begin(), of.end()};
  }
};
struct SummaryBuffers {
  StateBuffers state, transition;
  mutable std::vector<TensorView> states, transitions;
  operator Segment() const {  // NOLINT: views of it
    if (states.empty()) {
      states = state.views();
      transitions = transition.views();
    }
    return {states, transitions};
  }
};

// A call with its memory.
struct Call {
  Call(const Mechanism& mechanism, DType type, int64_t tokens, uint64_t seed, bool column_decays = false)
      : m(mechanism), dtype(type), wide(type == DType::kF64 ? DType::kF64 : DType::kF32) {
    const bool is_ssd = m.name == "ssd", is_h3 = m.name == "h3", is_scan = m.table.tensors[0].axes[1] == 'D';
    sizes = {.B = 2, .D = 6, .T = tokens, .N = 3, .G = 4, .L = -1, .H = 2, .d = 3, .W = 4, .w = 3};
    sizes.K = 20;
    sizes.V = 12;
    sizes.P = 5;
    sizes.M = 24;
    if (is_ssd) sizes.H = 4, sizes.G = 2;
    if (is_h3) sizes.D = sizes.H * sizes.d;
    if (is_scan) sizes.G = 2;
    const bool is_based = m.name == "based";
    if (is_based) sizes.K = 5;
    sizes.F = is_based                ? recurrence::FeatureSize(recurrence::Feature::kTaylor, sizes.K)
              : m.name == "performer" ? sizes.M
                                      : sizes.K;
    ConstTensorView keys;
    for (const Tensor& tensor : m.table.tensors) {
      if (tensor.values == mechanism::kMask || (tensor.role == Role::kLogValueDecay && !column_decays)) {
        tensors.emplace_back();
        continue;
      }
      const std::string_view axes = std::string_view(tensor.axes).substr(0, std::string_view(tensor.axes).find('|'));
      const Buffer buffer(tensor.type == mechanism::kAnyFloat && axes[0] != 'B' ? wide : dtype, ShapeOf(axes, sizes));
      ++seed;
      if (tensor.values == mechanism::kNormal || tensor.values == mechanism::kUnit ||
          tensor.values == mechanism::kNearlyKeys || tensor.values == mechanism::kNegativeKeys ||
          tensor.values == mechanism::kFractions || tensor.values == mechanism::kOpenGates) {
        recurrent::FillValues(tensor, buffer, seed, keys);
      } else {
        buffer.FillNormal(seed);
        const bool negative = tensor.values == mechanism::kDecays || tensor.values == mechanism::kRates;
        ForEach(buffer.view(), [&](const Shape& at) {
          const double x = GetElement(buffer.view(), at);
          SetElement(buffer.view(), at, negative ? -0.1 * std::exp(x) : std::abs(x) * 0.2);
        });
        if (tensor.values == mechanism::kLogSteps) buffer.FillConstant(-2.5);
      }
      if (tensor.role == Role::kKey) keys = buffer.view();
      tensors.push_back(buffer);
    }
    initial = States();
    d_final = States();
    for (StateBuffers* const states : {&initial, &d_final}) {
      for (const Buffer& buffer : states->buffers) buffer.FillNormal(++seed);
    }
    for (size_t i = 0; i < m.table.states.size(); ++i) {
      const Buffer& state = initial.buffers[i];
      if (m.table.states[i].role != StateTensor::kNormaliser) continue;
      ForEach(state.view(),
              [&](const Shape& at) { SetElement(state.view(), at, 5 + std::abs(GetElement(state.view(), at))); });
    }
    o = Output();
    d_o = Output().FillNormal(++seed);
  }

  StateBuffers States() const {
    StateBuffers states;
    for (const StateTensor& state : m.table.states) states.buffers.emplace_back(wide, ShapeOf(state.axes, sizes));
    return states;
  }
  SummaryBuffers Summary() const {
    SummaryBuffers summary;
    summary.state = States();
    const bool relative = std::ranges::any_of(
        m.table.states, [](const StateTensor& state) { return state.role == StateTensor::kMaximum; });
    for (const StateTensor& state : m.table.states) {
      std::string_view axes = state.axes;
      AxisSizes of = sizes;
      const bool decays = relative ? state.role == StateTensor::kMaximum : state.role != StateTensor::kNormaliser;
      const bool delta = m.table.Has(Role::kBeta) || m.table.Has(Role::kErase) || m.table.Has(Role::kWriteKey);
      const Tensor* const columns = m.table.Find(Role::kLogValueDecay);
      if (columns == nullptr || !tensors[m.table.IndexOf(*columns)].view().present()) of.V = of.P = delta ? of.F : 1;
      summary.transition.buffers.push_back(decays ? Buffer(wide, ShapeOf(axes, of)) : Buffer());
    }
    return summary;
  }
  Buffer Output() const {
    const Tensor* const value = m.table.Find(Role::kValue);
    std::string axes = value == nullptr ? m.table.tensors[0].axes : value->axes;
    std::erase(axes, 'N');
    return Buffer(dtype, ShapeOf(axes, sizes));
  }
  int TokenAxis(const Tensor& tensor) const { return static_cast<int>(std::string_view(tensor.axes).find('T')); }
  int OutputAxis() const { return m.table.tensors[0].axes[1] == 'D' ? 2 : 1; }

  // The tensors of tokens [begin, end).
  std::vector<ConstTensorView> Tokens(int64_t begin, int64_t end) const {
    std::vector<ConstTensorView> views;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const ConstTensorView t = tensors[i].view();
      const bool over = t.present() && m.table.tensors[i].over_tokens();
      views.push_back(over ? t.Slice(TokenAxis(m.table.tensors[i]), begin, end) : t);
    }
    return views;
  }

  const Mechanism& m;
  DType dtype, wide;
  AxisSizes sizes;
  std::vector<Buffer> tensors;
  StateBuffers initial, d_final;
  Buffer o, d_o;
};

// The largest difference relative to the largest element.
double Difference(const ConstTensorView& a, const ConstTensorView& b) {
  double most = 1e-30, difference = 0;
  ForEach(a, [&](const Shape& at) {
    most = std::max(most, std::abs(GetElement(b, at)));
    const double apart = std::abs(GetElement(a, at) - GetElement(b, at));
    difference = std::max(difference, std::isnan(apart) ? HUGE_VAL : apart);
  });
  return difference / most;
}

// Sums relative to a maximum, as sums: exp(m) S.
StateBuffers Absolute(const Mechanism& m, const StateBuffers& states) {
  size_t max = m.table.states.size();
  for (size_t i = 0; i < m.table.states.size(); ++i) {
    if (m.table.states[i].role == StateTensor::kMaximum) max = i;
  }
  if (max == m.table.states.size()) return states;
  StateBuffers absolute;
  for (size_t i = 0; i < max; ++i) {
    const ConstTensorView from = states.buffers[i].view(), of_max = states.buffers[max].view();
    absolute.buffers.emplace_back(DType::kF64, from.sizes());
    ForEach(from, [&](const Shape& at) {
      const Shape head(at.begin(), at.begin() + 2);
      SetElement(absolute.buffers[i].view(), at, GetElement(from, at) * std::exp(GetElement(of_max, head)));
    });
  }
  return absolute;
}

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
