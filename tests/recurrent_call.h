// Calls of recurrent mechanisms for the tests of their contract: a call with its memory, and every mechanism in every
// dtype.
#ifndef HEED_TESTS_RECURRENT_CALL_H_
#define HEED_TESTS_RECURRENT_CALL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "tests/call_views.h"

namespace heed::recurrent {

using Shape = std::vector<int64_t>;

using mechanism::CallInputs;
using mechanism::CallResults;

inline bool HasState(const Definition& d, StateTensor::Role role) {
  return std::ranges::any_of(StatesOf(d), [&](const StateTensor& state) { return state.role == role; });
}

// A call with its memory: every input, and every result.
struct Call {
  Call(const Mechanism& mechanism, DType dtype, int64_t B, int64_t T, int64_t H, int64_t group, int64_t K, int64_t V,
       int64_t sequences, uint64_t seed = 1)
      : m(&mechanism) {
    const Definition& d = mechanism.definition;
    const DType state = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    AxisSizes axes_of = {.B = B, .T = T, .N = 2, .G = H * group, .H = H, .K = K, .V = V, .M = 0};
    const Shape v = ShapeOf(d.o_axes(), axes_of);
    const auto fill = [&](const Shape& sizes, DType type) { return Buffer(type, sizes).FillNormal(++seed); };
    for (const Tensor& tensor : d.table.tensors) {
      const Shape shape = ShapeOf(tensor.axes, axes_of);
      const DType type = tensor.type == mechanism::kAnyFloat ? state : dtype;
      if (tensor.values != mechanism::kDecays) {
        const ConstTensorView keys = Has("k") ? Input("k").view() : TensorView();
        inputs.push_back({tensor.name, FillValues(tensor, Buffer(type, shape), ++seed, keys)});
        continue;
      }
      const Buffer decay(type, shape);
      Random random(++seed);
      ForEach(decay, [&](const Shape& at) { SetElement(decay.view(), at, 0.3 * std::log(1 - random.Uniform())); });
      inputs.push_back({tensor.name, decay});
    }
    axes_of.B = sequences;
    axes_of.F = recurrence::FeatureSize(d.feature, K);
    const auto shape_of = [&](StateTensor::Role role) -> Shape {
      return ShapeOf(std::ranges::find(d.table.states, role, &StateTensor::role)->axes, axes_of);
    };
    if (has_z()) {
      const Buffer z = fill(shape_of(role_of_z()), state);
      if (role_of_z() == StateTensor::kCurvature) {  // a sum of squares
        ForEach(z, [&](const Shape& at) { SetElement(z.view(), at, std::abs(GetElement(z.view(), at))); });
      }
      inputs.push_back({"initial_z", z});
    }
    if (d.causal) inputs.push_back({"initial_state", fill(shape_of(StateTensor::kState), state)});
    d_o = fill(v, dtype);
    o = Buffer(dtype, v);
    if (d.causal) {
      d_state = fill(shape_of(StateTensor::kState), state);
      final = Buffer(state, shape_of(StateTensor::kState));
    }
    if (has_z()) {
      d_z = fill(shape_of(role_of_z()), state);
      final_z = Buffer(state, shape_of(role_of_z()));
    }
    if (has_m()) {
      initial_m = fill(shape_of(StateTensor::kMaximum), state);
      final_m = Buffer(state, shape_of(StateTensor::kMaximum));
    }
    for (const auto& [name, input] : inputs) {
      gradients.push_back(Buffer(input.view().dtype(), input.view().sizes()));
    }
  }

  template <class F>
  static void ForEach(const Buffer& buffer, const F& f) {
    Shape index(buffer.view().sizes().size());
    if (buffer.view().num_elements() == 0) return;
    do {
      f(index);
    } while (NextIndex(buffer.view().sizes(), index));
  }

  const Buffer& Input(const std::string& name) const {
    for (const auto& [input_name, input] : inputs) {
      if (input_name == name) return input;
    }
    throw std::out_of_range(name);
  }
  bool Has(const std::string& name) const {
    return std::any_of(inputs.begin(), inputs.end(), [&](const auto& input) { return input.first == name; });
  }

  CallInputs Views() const {
    CallInputs in = {.table = m->definition.table};
    for (size_t i = 0; i < in.table.tensors.size(); ++i) in.tensors.push_back(inputs[i].second.view());
    in.d_o = d_o.view();
    for (const StateTensor& state : StatesOf(m->definition)) {
      const bool is_z = state.role == role_of_z(), is_m = state.role == StateTensor::kMaximum;
      in.initial.push_back((is_m ? initial_m : Input(is_z ? "initial_z" : "initial_state")).view());
      in.d_final.push_back(is_m ? TensorView() : (is_z ? d_z : d_state).view());
    }
    return in;
  }
  CallResults GradientViews() const {
    CallResults out;
    for (size_t i = 0; i < m->definition.table.tensors.size(); ++i) out.gradients.push_back(gradients[i].view());
    for (const StateTensor& state : StatesOf(m->definition)) {
      const bool is_z = state.role == role_of_z(), is_m = state.role == StateTensor::kMaximum;
      out.states.push_back(is_m ? TensorView() : gradients[gradients.size() - (is_z ? 2 : 1)].view());
    }
    return out;
  }
  std::vector<TensorView> FinalViews() const {
    std::vector<TensorView> views;
    for (const StateTensor& state : StatesOf(m->definition)) {
      const bool is_z = state.role == role_of_z(), is_m = state.role == StateTensor::kMaximum;
      views.push_back((is_m ? final_m : is_z ? final_z : final).view());
    }
    return views;
  }
  CallResults ResultViews() const { return {o.view(), FinalViews(), {}}; }
  // z is the state beside S: a normaliser, or A of preconditioned keys.
  StateTensor::Role role_of_z() const {
    return m->definition.preconditions() ? StateTensor::kCurvature : StateTensor::kNormaliser;
  }
  bool has_z() const { return HasState(m->definition, role_of_z()); }
  bool has_m() const { return HasState(m->definition, StateTensor::kMaximum); }
  const char* query_name() const { return m->definition.query().name; }
  const char* value_name() const { return m->definition.value().name; }

  void Forward(Context& ctx) const { m->forward(ctx, Views(), options, ResultViews()); }
  void Backward(Context& ctx) const { m->backward(ctx, Views(), options, GradientViews()); }
  void Both(Context& ctx) const {
    Forward(ctx);
    Backward(ctx);
  }

  // A call with these sizes, contents and options, and results of its own.
  Call Again() const {
    Call copy = *this;
    copy.o = Buffer(o.view().dtype(), o.view().sizes());
    const auto anew = [](const Buffer& buffer) { return Buffer(buffer.view().dtype(), buffer.view().sizes()); };
    copy.final = anew(final);
    if (has_z()) copy.final_z = anew(final_z);
    if (has_m()) copy.final_m = anew(final_m);
    for (Buffer& gradient : copy.gradients) {
      gradient = Buffer(gradient.view().dtype(), gradient.view().sizes());
    }
    return copy;
  }

  const Mechanism* m;
  std::vector<std::pair<std::string, Buffer>> inputs;
  Buffer d_o, d_state, o, final;
  Buffer d_z, final_z, initial_m, final_m;  // used by mechanisms that have them
  std::vector<Buffer> gradients;            // in the order of inputs
  Options options;
};

inline void ExpectSameBits(const Call& a, const Call& b) {
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view())) << "o";
  EXPECT_TRUE(SameBits(a.final.view(), b.final.view())) << "state";
  if (a.has_z()) {
    EXPECT_TRUE(SameBits(a.final_z.view(), b.final_z.view())) << "z";
  }
  if (a.has_m()) {
    EXPECT_TRUE(SameBits(a.final_m.view(), b.final_m.view())) << "m";
  }
  for (size_t i = 0; i < a.inputs.size(); ++i) {
    EXPECT_TRUE(SameBits(a.gradients[i].view(), b.gradients[i].view())) << "d" << a.inputs[i].first;
  }
}

// Rows [begin, end) of `axis` of one buffer have the bits of those from `other_begin` on of another.
inline void ExpectSameRows(const Buffer& a, int axis, int64_t begin, int64_t end, const Buffer& b, int64_t other_begin,
                           const std::string& what) {
  const ConstTensorView x = a.view(), y = b.view();
  const auto part = x.Slice(axis, begin, end);
  const auto other = y.Slice(axis, other_begin, other_begin + end - begin);
  EXPECT_TRUE(SameBits(part, other)) << what;
}

inline bool IsState(const std::string& name) { return name.starts_with("initial_"); }

inline bool OverTokens(const std::string& name, const Buffer& buffer) {
  return !IsState(name) && buffer.view().rank() >= 3;
}

inline void Copy(const ConstTensorView& from, const TensorView& to) {
  Shape index(to.sizes().size());
  if (to.num_elements() == 0) return;
  do {
    SetElement(to, index, GetElement(from, index));
  } while (NextIndex(to.sizes(), index));
}

// Passes the state after one call to the next, and the gradient of that state back.
inline void GoOn(const Call& first, Call& then) {
  Copy(first.final.view(), then.Input("initial_state").view());
  if (first.has_z()) Copy(first.final_z.view(), then.Input("initial_z").view());
  if (first.has_m()) Copy(first.final_m.view(), then.initial_m.view());
}
inline void GoBack(const Call& then, Call& first) {
  Copy(then.gradients.back().view(), first.d_state.view());
  if (then.has_z()) Copy(then.gradients[then.gradients.size() - 2].view(), first.d_z.view());
}

struct Parameter {
  const Mechanism* mechanism;
  DType dtype;
};
inline void PrintTo(const Parameter& p, std::ostream* os) { *os << p.mechanism->name; }

inline bool IsGated(const Parameter& p) {
  return p.mechanism->definition.table.Has(mechanism::Role::kLogDecay) || p.mechanism->definition.exp_gates();
}

// Every recurrent mechanism in every dtype, filtered by `wanted`.
template <class F>
std::vector<Parameter> Parameters(const F& wanted) {
  std::vector<Parameter> parameters;
  for (const OpEntry& op : AllOps()) {
    for (const DType dtype : op.dtypes) {
      if (op.recurrent == nullptr) continue;
      const Parameter parameter = {op.recurrent, dtype};
      if (wanted(parameter)) parameters.push_back(parameter);
    }
  }
  return parameters;
}

inline std::string ParameterName(const testing::TestParamInfo<Parameter>& info) {
  return info.param.mechanism->name + "_" + Name(info.param.dtype);
}

class Recurrent : public testing::TestWithParam<Parameter> {
 protected:
  Call Make(int64_t B, int64_t T, int64_t H, int64_t group, int64_t K, int64_t V, int64_t sequences = -1) const {
    return Call(*GetParam().mechanism, GetParam().dtype, B, T, H, group, K, V, sequences < 0 ? B : sequences);
  }
  // Sizes of bf16 for which a CPU with AMX uses chunks, unless they would give too many features.
  int64_t Large(int64_t size) const {
    const bool many = GetParam().mechanism->definition.feature == recurrence::Feature::kTaylor;
    return GetParam().dtype == DType::kBF16 && !many ? size + 64 : size;
  }
  bool gated() const { return IsGated(GetParam()); }
  // True if outputs and states are chains over single tokens: a split anywhere keeps their bits.
  bool sequential() const {
    const Definition& d = GetParam().mechanism->definition;
    return !gated() || d.delta() != recurrence::Delta::kNone || d.channels();
  }
  Context ctx_{2};
};

}  // namespace heed::recurrent

#endif  // HEED_TESTS_RECURRENT_CALL_H_
