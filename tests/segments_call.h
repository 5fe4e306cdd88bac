// Every mechanism with states, and a random call of it, for tests that cut its tokens into parts.
#ifndef HEED_TESTS_SEGMENTS_CALL_H_
#define HEED_TESTS_SEGMENTS_CALL_H_

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

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

namespace heed::segments {

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
inline void PrintTo(const Mechanism& m, std::ostream* os) { *os << m.name; }

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

inline performer::Options Causal() {
  performer::Options options;
  options.causal = true;
  return options;
}
inline linear_attention::Options Normalized() {
  linear_attention::Options options;
  options.causal = true;
  options.normalize = true;
  return options;
}
inline selective_scan::Options Softplus() {
  selective_scan::Options options;
  options.delta_softplus = true;
  return options;
}

inline const std::vector<Mechanism>& Mechanisms() {
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

inline void ForEach(const ConstTensorView& t, const std::function<void(const Shape&)>& f) {
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
inline double Difference(const ConstTensorView& a, const ConstTensorView& b) {
  double most = 1e-30, difference = 0;
  ForEach(a, [&](const Shape& at) {
    most = std::max(most, std::abs(GetElement(b, at)));
    const double apart = std::abs(GetElement(a, at) - GetElement(b, at));
    difference = std::max(difference, std::isnan(apart) ? HUGE_VAL : apart);
  });
  return difference / most;
}

// Sums relative to a maximum, as sums: exp(m) S.
inline StateBuffers Absolute(const Mechanism& m, const StateBuffers& states) {
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

// Options of calls on segments: causal, with a normaliser where there is one.
template <class Options>
Options Own() {
  Options options;
  if constexpr (requires { options.causal; }) options.causal = true;
  if constexpr (requires { options.normalize; }) options.normalize = true;
  if constexpr (requires { options.delta_softplus; }) options.delta_softplus = true;
  return options;
}

}  // namespace heed::segments

#endif  // HEED_TESTS_SEGMENTS_CALL_H_
