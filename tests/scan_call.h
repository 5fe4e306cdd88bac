// Calls of mechanisms on the scan engine for tests: all inputs, all results.
#ifndef HEED_TESTS_SCAN_CALL_H_
#define HEED_TESTS_SCAN_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/gated/hgrn/hgrn.h"
#include "heed/ops/gated/hgrn/hgrn_internal.h"
#include "heed/ops/gated/rg_lru/rg_lru.h"
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "heed/ops/ssm/h3/h3.h"
#include "heed/ops/ssm/h3/h3_internal.h"
#include "heed/ops/ssm/s4d/s4d.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"
#include "tests/call_views.h"

namespace heed::scanning {

using mechanism::CallInputs;
using mechanism::CallResults;
using Shape = std::vector<int64_t>;

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A mechanism with its options' defaults, except softplus.
struct ScanFunctions {
  const char* name;
  Definition definition;
  std::function<void(Context&, const Arguments&, const Options&, const Results&)> forward, backward;
  std::function<void(Context&, const Arguments&, const Results&)> step;
  std::function<int64_t(const Context&, const Arguments&)> workspace, backward_workspace;
};

#define HEED_MECHANISM(op, own)                                                                \
  ScanFunctions {                                                                              \
    #op, op::DefinitionOf(own),                                                                \
        [](Context& ctx, const Arguments& in, const Options& options, const Results& out) {    \
          using Of = mechanism::Lists<op::Structs>;                                            \
          op::Forward(ctx, Of::InputsOf(in), With(own, options), Of::OutputsOf(out));          \
        },                                                                                     \
        [](Context& ctx, const Arguments& in, const Options& options, const Results& out) {    \
          using Of = mechanism::Lists<op::Structs>;                                            \
          op::Backward(ctx, Of::InputsOf(in), With(own, options), Of::GradientsOf(out));       \
        },                                                                                     \
        [](Context& ctx, const Arguments& in, const Results& out) {                            \
          using Of = mechanism::Lists<op::Structs>;                                            \
          op::Step(ctx, Of::InputsOf(in), own, Of::OutputsOf(out).final, out.o);               \
        },                                                                                     \
        [](const Context& ctx, const Arguments& in) {                                          \
          return op::Workspace(ctx, mechanism::Lists<op::Structs>::InputsOf(in), own);         \
        },                                                                                     \
        [](const Context& ctx, const Arguments& in) {                                          \
          return op::BackwardWorkspace(ctx, mechanism::Lists<op::Structs>::InputsOf(in), own); \
        }                                                                                      \
  }

inline selective_scan::Options Softplus() {
  selective_scan::Options options;
  options.delta_softplus = true;
  return options;
}

inline const ScanFunctions kMechanisms[] = {
    HEED_MECHANISM(selective_scan, Softplus()), HEED_MECHANISM(rg_lru, rg_lru::Options()),
    HEED_MECHANISM(hgrn, hgrn::Options()), HEED_MECHANISM(s4d, s4d::Options()), HEED_MECHANISM(h3, h3::Options())};

inline void Copy(const ConstTensorView& from, const TensorView& to) {
  Shape index(to.sizes().size());
  if (to.num_elements() == 0) return;
  do {
    SetElement(to, index, GetElement(from, index));
  } while (NextIndex(to.sizes(), index));
}

// The order of the last two axes: row-major, swapped, or neither contiguous.
enum class Layout { kRows, kColumns, kNeither };

inline Buffer Make(Layout layout, DType dtype, const Shape& sizes) {
  Shape strides(sizes.size());
  int64_t step = layout == Layout::kNeither ? 2 : 1;
  std::vector<size_t> order;
  for (size_t i = 0; i < sizes.size(); ++i) order.push_back(i);
  if (layout == Layout::kColumns && sizes.size() > 2) std::swap(order.end()[-1], order.end()[-2]);
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return Buffer(dtype, sizes, strides, Placement::kBeforeGuard);
}

template <class F>
void ForEach(const Buffer& buffer, const F& f) {
  Shape at(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return;
  do {
    f(at);
  } while (NextIndex(buffer.view().sizes(), at));
}

// Uses heads of up to 3 channels, and 4 taps, if the sizes do not determine them.
inline AxisSizes WithHeads(AxisSizes sizes, const Definition& definition) {
  if (std::string_view(definition.o_axes()).find('H') == std::string_view::npos) return sizes;
  if (sizes.d < 0) sizes.d = std::min<int64_t>(sizes.D, 3);
  if (sizes.H < 0) sizes.H = sizes.d == 0 ? 0 : sizes.D / sizes.d;
  if (sizes.W < 0) sizes.W = 4;
  sizes.D = sizes.H * sizes.d;
  sizes.w = sizes.W - 1;
  return sizes;
}

// A state of a call.
struct StateBuffers {
  StateTensor tensor;
  Buffer initial, d_final, final, dinitial;
};

// A call with its memory: all inputs, all results.
struct ScanCall {
  ScanCall(const ScanFunctions& mechanism, DType dtype, const AxisSizes& of, Layout layout = Layout::kRows,
           int64_t sequences = -1, int rank = 4)
      : m(&mechanism), sizes(WithHeads(of, mechanism.definition)) {
    const Definition& d = m->definition;
    const DType wide = mechanism::StateDType(dtype);
    uint64_t seed = 0;
    for (const Tensor& tensor : d.table.tensors) {
      const bool several = std::string_view(tensor.axes).find('|') != std::string::npos;
      const std::string form = several ? std::string(mechanism::AxesOfRank(tensor.axes, rank)) : tensor.axes;
      axes.push_back(form);
      const Shape shape = mechanism::ShapeOf(form, sizes);
      inputs.push_back(Make(layout, dtype, shape).FillNormal(++seed));
      results.push_back(Make(layout, dtype, shape));
      const auto change = [&](double (*to)(double)) {
        ForEach(inputs.back(), [&](const Shape& at) {
          SetElement(inputs.back().view(), at, to(GetElement(inputs.back().view(), at)));
        });
      };
      if (tensor.values == mechanism::kRates || tensor.values == mechanism::kDecays) {
        change([](double x) { return -0.5 * std::exp(x); });
      }
      if (tensor.values == mechanism::kSteps || tensor.values == mechanism::kLogSteps) {
        change([](double x) { return x - 2; });
      }
    }
    const Shape shape = mechanism::ShapeOf(axes[0], sizes);
    o = Make(layout, dtype, shape);
    d_o = Make(layout, dtype, shape).FillNormal(++seed);
    AxisSizes of_states = sizes;
    if (sequences >= 0) of_states.B = sequences;
    for (const StateTensor& tensor : d.table.states) {
      const Shape state = mechanism::ShapeOf(tensor.axes, of_states);
      Buffer initial = Buffer(wide, state).FillNormal(++seed);
      Buffer d_final = Buffer(wide, state).FillNormal(++seed);
      states.push_back({tensor, std::move(initial), std::move(d_final), Buffer(wide, state), Buffer(wide, state)});
    }
  }

  CallInputs Views() const {
    CallInputs in = {.table = m->definition.table};
    for (const Buffer& input : inputs) in.tensors.push_back(input.view());
    in.d_o = d_o.view();
    for (const StateBuffers& state : states) {
      in.initial.push_back(state.initial.view());
      in.d_final.push_back(state.d_final.view());
    }
    return in;
  }
  CallResults Gradients() const {
    CallResults out;
    for (const Buffer& result : results) out.gradients.push_back(result.view());
    for (const StateBuffers& state : states) out.states.push_back(state.dinitial.view());
    return out;
  }
  CallResults WhatIsWritten() const {
    CallResults out;
    out.o = o.view();
    for (const StateBuffers& state : states) out.states.push_back(state.final.view());
    return out;
  }
  void Forward(Context& ctx) const { m->forward(ctx, Views(), options, WhatIsWritten()); }
  const ScanCall& Both(Context& ctx) const {
    Forward(ctx);
    m->backward(ctx, Views(), options, Gradients());
    return *this;
  }
  std::vector<std::pair<std::string, Buffer>> Written() const {
    std::vector<std::pair<std::string, Buffer>> all = {{"o", o}};
    for (const StateBuffers& state : states) {
      all.push_back({std::string("state ") + state.tensor.name, state.final});
      all.push_back({std::string("dinitial_state ") + state.tensor.name, state.dinitial});
    }
    for (size_t i = 0; i < results.size(); ++i) {
      all.push_back({std::string("d") + m->definition.table.tensors[i].name, results[i]});
    }
    return all;
  }
  // Tokens [first, first + n) of a tensor; constants whole.
  TensorView Part(const Buffer& x, size_t i, int64_t first, int64_t n) const {
    const size_t at = axes[i].find('T');
    if (at == std::string::npos) return x.view();
    return x.view().Slice(static_cast<int>(at), first, first + n);
  }

  const ScanFunctions* m;
  AxisSizes sizes;
  std::vector<std::string> axes;
  std::vector<Buffer> inputs, results;
  Buffer o, d_o;
  std::vector<StateBuffers> states;
  Options options;
};

inline void ExpectSameBits(const ScanCall& a, const ScanCall& b) {
  const auto as = a.Written(), bs = b.Written();
  for (size_t i = 0; i < as.size(); ++i) {
    EXPECT_TRUE(SameBits(as[i].second.view(), bs[i].second.view())) << a.m->name << as[i].first;
  }
}

}  // namespace heed::scanning

#endif  // HEED_TESTS_SCAN_CALL_H_
