// Calls of mechanisms on the scan engine: checks, conversion to the engine's problem, and runs.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/device_name.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/scan/convolution.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/tasks.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/scanning_internal.h"

namespace heed::scanning {
namespace {

using mechanism::CheckTensor;
using mechanism::Fail;

Device DeviceOf(const Definition& definition, const Inputs& in) {
  const Device device = (in.*definition.tensors[0].input).device();
  return device.type == DeviceType::kCuda ? device : Device();
}

// The member of the engine's problem for a tensor, by its type: tokens, numbers of channels, or weights, which are
// either.
template <class Owner>
using Place = std::variant<scan::Tokens Owner::*, scan::Numbers Owner::*, scan::Weights Owner::*>;

// Every tensor that some mechanism takes, and its member in the engine's problem.
struct Taken {
  const char* name;
  ConstTensorView StepInputs::* input;
  TensorView Gradients::* gradient;
  Place<scan::Problem> place;
  Place<scan::Gradients> gradient_place;
};
constexpr Taken kAll[] = {
    {"u", &Inputs::u, &Gradients::du, &scan::Problem::x, &scan::Gradients::dx},
    {"delta", &Inputs::delta, &Gradients::ddelta, &scan::Problem::delta, &scan::Gradients::ddelta},
    {"A", &Inputs::A, &Gradients::dA, &scan::Problem::A, &scan::Gradients::dA},
    {"B", &Inputs::B, &Gradients::dB, &scan::Problem::B, &scan::Gradients::dB},
    {"C", &Inputs::C, &Gradients::dC, &scan::Problem::C, &scan::Gradients::dC},
    {"D", &Inputs::D, &Gradients::dD, &scan::Problem::skip, &scan::Gradients::dskip},
    {"z", &Inputs::z, &Gradients::dz, &scan::Problem::gate, &scan::Gradients::dgate},
    {"delta_bias", &Inputs::delta_bias, &Gradients::ddelta_bias, &scan::Problem::bias, &scan::Gradients::dbias},
    {"x", &Inputs::x, &Gradients::dx, &scan::Problem::x, &scan::Gradients::dx},
    {"input_gate", &Inputs::input_gate, &Gradients::dinput_gate, &scan::Problem::input_gate,
     &scan::Gradients::dinput_gate},
    {"recurrence_gate", &Inputs::recurrence_gate, &Gradients::drecurrence_gate, &scan::Problem::recurrence_gate,
     &scan::Gradients::drecurrence_gate},
    {"a", &Inputs::a, &Gradients::da, &scan::Problem::lambda, &scan::Gradients::dlambda},
    {"log_decay", &Inputs::log_decay, &Gradients::dlog_decay, &scan::Problem::log_decay, &scan::Gradients::dlog_decay},
    {"log_dt", &Inputs::log_dt, &Gradients::dlog_dt, &scan::Problem::log_dt, &scan::Gradients::dlog_dt},
    {"log_A_real", &Inputs::log_A_real, &Gradients::dlog_A_real, &scan::Problem::log_A_real,
     &scan::Gradients::dlog_A_real},
    {"A_imag", &Inputs::A_imag, &Gradients::dA_imag, &scan::Problem::A_imag, &scan::Gradients::dA_imag},
    {"kernel", &Inputs::kernel, &Gradients::dkernel, &scan::Problem::taps, &scan::Gradients::dtaps},
    {"q", &Inputs::q, &Gradients::dq, &scan::Problem::x, &scan::Gradients::dx},
    {"k", &Inputs::k, &Gradients::dk, &scan::Problem::key, &scan::Gradients::dkey},
    {"v", &Inputs::v, &Gradients::dv, &scan::Problem::value, &scan::Gradients::dvalue},
    {"shift", &Inputs::shift, &Gradients::dshift, &scan::Problem::key_taps, &scan::Gradients::dkey_taps},
    {"shift_D", &Inputs::shift_D, &Gradients::dshift_D, &scan::Problem::key_skip, &scan::Gradients::dkey_skip},
};

template <class Owner>
void PlaceTensor(const Call& call, const Tensor& tensor, const ConstTensorView& t, const Place<Owner>& place,
                 Owner& in) {
  if (const auto* tokens = std::get_if<scan::Tokens Owner::*>(&place)) {
    in.** tokens = call.TokensOf(t);
  } else if (const auto* numbers = std::get_if<scan::Numbers Owner::*>(&place)) {
    in.** numbers = call.NumbersOf(t);
  } else {
    scan::Weights& weights = in.*std::get<scan::Weights Owner::*>(place);
    weights = {};
    if (!t.present()) return;
    if (mechanism::AxesOfRank(tensor.axes, t.rank())[0] == 'B') {
      weights.tokens = call.TokensOf(t);
    } else {
      weights.constants = call.NumbersOf(t);
    }
  }
}

// Calls f(tensor, taken) for the tensors of a mechanism.
template <class F>
void ForTaken(const Definition& definition, const F& f) {
  for (const Tensor& tensor : definition.tensors) {
    f(tensor, *std::ranges::find(kAll, tensor.input, &Taken::input));
  }
}

constexpr StateTensor kState = {
    "S", "", &Inputs::initial, &Outputs::final, &BackwardInputs::d_final, &Gradients::dinitial, &StepState::state};
constexpr StateTensor kTail = {"tail",
                               "",
                               &Inputs::initial_tail,
                               &Outputs::final_tail,
                               &BackwardInputs::d_final_tail,
                               &Gradients::dinitial_tail,
                               &StepState::tail};

// "initial_state", or "initial_state.tail".
std::string NameOf(const Definition& definition, const char* what, const StateTensor& state) {
  return std::string(what) + (definition.tail_axes[0] == '\0' ? "" : std::string(".") + state.name);
}

// Calls f(state, shape) for the states of this mechanism; throws if others are given.
template <class Views, class View, class F>
void ForStates(const char* op, const Call& call, const Definition& definition, const char* what, const char* verb,
               const Views& views, View StateTensor::* member, const F& f) {
  const States states = definition.states();
  for (const StateTensor& other : {kTail, kState}) {
    const auto own = std::ranges::find(states, other.initial, &StateTensor::initial);
    const auto& view = views.*(other.*member);
    if (own == states.end()) {
      if (view.present()) Fail(op, NameOf(definition, what, other).c_str(), verb, "none: it has no such state");
      continue;
    }
    if (!view.present()) continue;
    f(NameOf(definition, what, other), view, call.state_shapes[static_cast<size_t>(own - states.begin())]);
  }
}

bool Takes(const Definition& definition, const Taken& taken) {
  return std::ranges::any_of(definition.tensors, [&](const Tensor& own) { return own.input == taken.input; });
}

// "[B, G, N, T], [B, N, T] or [D, N]".
std::string Described(std::string_view axes) {
  std::string text = "[";
  for (const char c : axes) {
    if (c == '|') {
      text += "], [";
      continue;
    }
    if (text.back() != '[') text += ", ";
    text += c;
  }
  text += "]";
  if (const size_t at = text.rfind("], ["); at != std::string::npos) text.replace(at, 3, "] or ");
  return text;
}

bool IsOverTokens(std::string_view axes) { return axes.find('T') != std::string::npos; }

// Throws for a strict context if neither tokens nor columns are contiguous, so that elements would be gathered one by
// one.
void RefuseToGather(const char* op, const char* name, const Context* ctx, const ConstTensorView& t,
                    const std::string& axes) {
  if (ctx == nullptr || !ctx->strict() || !IsOverTokens(axes)) return;
  const auto token = static_cast<int>(axes.find('T'));
  const int column = token == t.rank() - 1 ? token - 1 : t.rank() - 1;
  const bool has_columns = (std::abs(t.stride(column)) == 1 && t.size(column) > 1) ||
                           (column == 3 && t.size(3) == 1 && std::abs(t.stride(2)) == 1);
  if (t.size(token) <= 1 || std::abs(t.stride(token)) == 1 || has_columns) return;
  throw Unsupported(std::string(op) + ": " + name +
                    ": neither tokens nor channels are contiguous, so that they would be gathered "
                    "one by one, which a strict Context forbids");
}

int TokenAxis(std::string_view axes) { return static_cast<int>(axes.find('T')); }

// Clears tokens that belong to no sequence, and calls without channels, which have no task. Kernels of devices clear
// these themselves after AddOthers().
void ClearOthers(const Call& call, const TensorView& t, std::string_view axes) {
  if (call.problem.device.type != DeviceType::kCpu) return;
  const std::vector<mechanism::TokenRange> none;
  mechanism::ClearOthers(call.sizes.D == 0 ? none : call.ranges, t, TokenAxis(axes));
}

void AddOthers(Call& call) {
  if (call.problem.device.type == DeviceType::kCpu) return;
  const std::vector<mechanism::TokenRange> none;
  mechanism::ForOthers(call.sizes.D == 0 ? none : call.ranges, call.sizes.B, call.sizes.T,
                       [&](int64_t b, int64_t begin, int64_t end) {
                         call.problem.others.push_back({b, 0, call.reverse() ? 1 - end : begin, end - begin});
                       });
}

// All inputs, for the overlap checks of outputs.
mechanism::Apart Readers(const Definition& definition, const Inputs& in, const Options& options) {
  mechanism::Apart apart(DeviceOf(definition, in));
  for (const Tensor& tensor : definition.tensors) apart.Reads(tensor.name, in.*tensor.input);
  for (const StateTensor& state : definition.states()) {
    const ConstTensorView& t = in.*state.initial;
    if (t.present()) apart.Reads(NameOf(definition, "initial_state", state).c_str(), t);
  }
  apart.Reads("lengths", options.lengths);
  apart.Reads("starts", options.starts);
  apart.Reads("cu_seqlens", options.cu_seqlens);
  return apart;
}

// [B, D] as [B, D, 1], or [B, 1, D]; constants unchanged. For [B, N] or [D, N] the first axis decides, given `batch`
// sequences and the channels.
ConstTensorView OneToken(const char* op, const Tensor& tensor, const ConstTensorView& t, int64_t batch,
                         int64_t channels) {
  if (!t.present() || !tensor.over_tokens()) return t;
  const std::string axes = AxesOf(tensor, t.rank() + 1), constant = AxesOf(tensor, t.rank());
  const bool may_be_token = IsOverTokens(axes);
  if (!constant.empty() && !IsOverTokens(constant)) {
    if (!may_be_token || (t.size(0) == channels && channels != batch)) return t;
    if (t.size(0) == channels) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(),
           "[B, 1, N] or [B, D, N], as B = D and it may be of sequences or of channels");
    }
  }
  if (!may_be_token) {
    std::string expected = tensor.axes;
    std::erase(expected, 'T');
    Fail(op, tensor.name, "has shape " + t.ShapeString(), "one token of each sequence: " + Described(expected));
  }
  Axes sizes, strides;
  int axis = 0;
  for (const char letter : axes) {
    sizes.Append(letter == 'T' ? 1 : t.size(axis));
    strides.Append(letter == 'T' ? 0 : t.stride(axis));
    if (letter != 'T') ++axis;
  }
  return {t.data(), t.dtype(), sizes, strides, t.device()};
}

}  // namespace

States Definition::states() const {
  States states;
  for (auto [axes, state] : {std::pair(tail_axes, kTail), {state_axes, kState}}) {
    state.axes = axes;
    if (axes[0] != '\0') states.Append(state);
  }
  return states;
}

void Call::Reset() {
  std::vector<scan::Sequence> sequences = std::move(problem.sequences);
  sequences.clear();
  problem = {};
  problem.sequences = std::move(sequences);
  sizes = {};
}

void Call::Check(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
                 const Options& options, bool data) {
  Reset();
  if (definition.rule == scan::Rule::kGates && (!(definition.c > 0) || std::isinf(definition.c))) {
    Fail(op, "c", "is " + mechanism::Text(definition.c), "a positive number");
  }
  reverse_ = options.reverse;
  const Tensor& first = definition.tensors[0];
  const ConstTensorView& scanned = in.*first.input;
  if (!scanned.present()) Fail(op, first.name, "is absent", "a tensor");
  if (!IsFloat(scanned.dtype())) {
    Fail(op, first.name, std::string("has dtype ") + Name(scanned.dtype()), "f64, f32, bf16 or f16");
  }
  const DType dtype = scanned.dtype();
  problem.device = DeviceOf(definition, in);
  if (definition.kernels != nullptr && problem.device.type != DeviceType::kCpu) {
    throw Unsupported(std::string(op) + ": computes on the CPU alone, not on " + heed::NameOf(problem.device));
  }
  channels_first_ = std::string_view(first.axes) == "BDT";
  for (const Tensor& tensor : definition.tensors) {
    const ConstTensorView& t = in.*tensor.input;
    if (!t.present() && tensor.optional) continue;
    if (!t.present()) Fail(op, tensor.name, "is absent", "a tensor");
    const std::string axes = AxesOf(tensor, t.rank());
    const char* const taps = std::string_view(tensor.axes).find('W') == std::string_view::npos ? "" : " with W >= 1";
    if (axes.empty()) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(), Described(tensor.axes) + taps);
    }
    if (axes == "BNT" && sizes.G < 0) sizes.G = 1;
    for (size_t i = 0; i < axes.size(); ++i) {  // sizes that are not known yet
      if (sizes[axes[i]] < 0) sizes[axes[i]] = t.size(static_cast<int>(i));
    }
    if (sizes.H >= 0 && sizes.d >= 0) sizes.D = sizes.H * sizes.d;
    sizes.w = sizes.W - 1;
    if (sizes.W == 0) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(), Described(tensor.axes) + taps);
    }
    if ((axes == "BNT" && sizes.G != 1) || sizes.G == 0 || sizes.N == 0 || (sizes.G > 0 && sizes.D % sizes.G != 0)) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(),
           Described(tensor.axes) + ", N >= 1, G >= 1 dividing D = " + std::to_string(sizes.D) +
               (sizes.G > 1 ? ", G = " + std::to_string(sizes.G) : ""));
    }
    if (axes.find('L') != std::string::npos && sizes.L > sizes.T) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(),
           Described(tensor.axes) + " with L <= T = " + std::to_string(sizes.T));
    }
    const bool wide = IsOverTokens(axes) || tensor.type == Tensor::kWide;
    const bool own = wide ? t.dtype() == StateDType(dtype) : IsFloat(t.dtype());
    CheckTensor(op, tensor.name, t, ShapeOf(axes, sizes), own ? t.dtype() : dtype, data, problem.device);
    if (definition.kernels == nullptr) RefuseToGather(op, tensor.name, checks, t, axes);
    const bool decays = tensor.values == Tensor::kDecays || tensor.values == Tensor::kRates;
    if (decays && checks != nullptr && checks->checks() && t.data() != nullptr && t.device().type == DeviceType::kCpu) {
      mechanism::CheckNotPositive(op, tensor.name, t);
    }
  }
  for (const Taken& taken : kAll) {
    if (!Takes(definition, taken) && (in.*taken.input).present()) Fail(op, taken.name, "is given", "none");
  }
  if (sizes.N < 0) sizes.N = 1;
  if (sizes.G < 0) sizes.G = 1;

  mechanism::Ranges(op, first.name, scanned, TokenAxis(first.axes), options, data, ranges);
  shape = ShapeOf(first.axes, sizes);
  AxisSizes of_states = sizes;
  of_states.B = static_cast<int64_t>(ranges.size());
  const States states = definition.states();
  for (size_t i = 0; i < states.size(); ++i) state_shapes[i] = ShapeOf(states[i].axes, of_states);
  ForStates(op, *this, definition, "initial_state", "is given", in, &StateTensor::initial,
            [&](const std::string& name, const ConstTensorView& t, const Axes& expected) {
              CheckTensor(op, name.c_str(), t, expected, StateDType(dtype), data, problem.device);
            });

  problem.dtype = dtype;
  problem.rule = definition.rule;
  const bool heads = definition.rule == scan::Rule::kHeads;
  problem.channels = heads ? sizes.H : sizes.D;
  problem.head_channels = heads ? sizes.d : 0;
  problem.num_key_taps = heads ? sizes.W : 0;
  problem.states = sizes.N;
  problem.num_taps = std::max<int64_t>(sizes.L, 0);
  problem.groups = sizes.G;
  problem.softplus = definition.softplus;
  problem.c = definition.c;
  problem.bilinear = definition.bilinear;
  for (size_t i = 0; i < ranges.size(); ++i) {
    // With `reverse`, strides are negative and tokens count from the end.
    problem.sequences.push_back({ranges[i].batch, static_cast<int64_t>(i),
                                 reverse_ ? 1 - ranges[i].end : ranges[i].begin, ranges[i].end - ranges[i].begin});
  }
  if (definition.kernels != nullptr) return;
  ForTaken(definition, [&](const Tensor& tensor, const Taken& taken) {
    PlaceTensor(*this, tensor, in.*taken.input, taken.place, problem);
  });
  problem.initial = StatesOf(in.initial);
  problem.initial_tail = TailOf(in.initial_tail);
}

scan::Tokens Call::TokensOf(const ConstTensorView& t) const {
  if (!t.present()) return {};
  if (!channels_first_ && t.rank() == 4) {
    scan::Tokens of = TailOf(t);
    if (reverse_) of.token = -of.token;
    return of;
  }
  const int token = channels_first_ ? t.rank() - 1 : 1, column = channels_first_ ? t.rank() - 2 : 2;
  return {t.data(),         t.dtype(),
          t.stride(0),      reverse_ ? -t.stride(token) : t.stride(token),
          t.stride(column), t.rank() == 4 ? t.stride(1) : 0};
}

// Strides of axes of size 1 are set as if the tensor were contiguous.
scan::Tokens Call::TailOf(const ConstTensorView& t) {
  if (!t.present()) return {};
  const int64_t heads = t.size(2), channels = t.size(3);
  const int64_t column = channels == 1 ? t.stride(2) : t.stride(3);
  return {t.data(), t.dtype(), t.stride(0), t.stride(1), column, heads == 1 ? channels * column : t.stride(2)};
}

scan::Numbers Call::NumbersOf(const ConstTensorView& t) const {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), 0, t.stride(0), t.rank() > 1 ? t.stride(1) : 0, t.rank() > 2 ? t.stride(2) : 0};
}

scan::Numbers Call::StatesOf(const ConstTensorView& t) {
  if (!t.present()) return {};
  if (t.rank() == 6) {
    return {t.data(), t.dtype(), t.stride(0), t.stride(1), t.stride(4), t.stride(5), t.stride(2), t.stride(3)};
  }
  return {
      t.data(), t.dtype(), t.stride(0), t.stride(1), t.rank() > 2 ? t.stride(2) : 0, t.rank() > 3 ? t.stride(3) : 0};
}

namespace {

// A convolution does not compute intermediate states, so a call with an initial or a requested final state uses the
// recurrence.
void ChooseMethod(const Definition& definition, bool states, scan::Problem& p) {
  if (p.rule != scan::Rule::kModes && p.rule != scan::Rule::kHeads) return;
  const bool cheaper = definition.method == scan::Method::kAuto && scan::PrefersTaps(p);
  p.has_taps = !states && (cheaper || definition.method == scan::Method::kConvolution);
  if (p.has_taps) p.num_taps = scan::MostTokens(p);
}

}  // namespace

void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in, const Options& options,
             const Outputs& out) {
  const os::ScopedFloatControl float_control;
  Call call(op, &ctx, definition, in, options, true);
  scan::Problem& p = call.problem;
  mechanism::Apart apart = Readers(definition, in, options);
  apart.Writes(op, "o", out.o, call.shape, p.dtype);
  ForStates(op, call, definition, "final_state", "is asked for", out, &StateTensor::final,
            [&](const std::string& name, const TensorView& t, const Axes& shape) {
              apart.Writes(op, name.c_str(), t, shape, StateDType(p.dtype));
            });
  if (definition.kernels != nullptr) {
    definition.kernels->forward(op, ctx, definition, call, in, out);
  } else {
    p.o = call.TokensOf(out.o);
    p.final = Call::StatesOf(out.final);
    p.final_tail = Call::TailOf(out.final_tail);
    ChooseMethod(definition, in.initial.present() || out.final.present(), p);
    AddOthers(call);
    scan::Choose(op, ctx, p).forward(ctx, p);
  }
  ClearOthers(call, out.o, definition.tensors[0].axes);
}

void Backward(const char* op, Context& ctx, const Definition& definition, const BackwardInputs& in,
              const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  Call call(op, &ctx, definition, in, options, true);
  scan::Problem& p = call.problem;
  mechanism::Apart apart = Readers(definition, in, options);
  CheckTensor(op, "d_o", in.d_o, call.shape, p.dtype, true, p.device);
  if (definition.kernels == nullptr) {
    RefuseToGather(op, "d_o", &ctx, in.d_o, definition.tensors[0].axes);
  }
  apart.Reads("d_o", in.d_o);
  ForStates(op, call, definition, "d_state", "is given", in, &StateTensor::d_final,
            [&](const std::string& name, const ConstTensorView& t, const Axes& shape) {
              CheckTensor(op, name.c_str(), t, shape, StateDType(p.dtype), true, p.device);
              apart.Reads(name.c_str(), t);
            });
  for (const Tensor& tensor : definition.tensors) {
    const TensorView& t = out.*tensor.gradient;
    if (!t.present()) continue;
    const std::string name = std::string("d") + tensor.name;
    const ConstTensorView& input = in.*tensor.input;
    if (!input.present()) Fail(op, name.c_str(), "is asked for", "none: there is no such input");
    apart.Writes(op, name.c_str(), t, input.sizes(), input.dtype());
  }
  for (const Taken& taken : kAll) {
    if (Takes(definition, taken) || !(out.*taken.gradient).present()) continue;
    Fail(op, (std::string("d") + taken.name).c_str(), "is asked for", "none: there is no such input");
  }
  ForStates(op, call, definition, "dinitial_state", "is asked for", out, &StateTensor::dinitial,
            [&](const std::string& name, const TensorView& t, const Axes& shape) {
              apart.Writes(op, name.c_str(), t, shape, StateDType(p.dtype));
            });
  if (definition.kernels != nullptr) {
    definition.kernels->backward(op, ctx, definition, call, in, out);
  } else {
    scan::Gradients g;
    g.d_o = call.TokensOf(in.d_o);
    g.d_final = Call::StatesOf(in.d_final);
    g.dinitial = Call::StatesOf(out.dinitial);
    g.d_final_tail = Call::TailOf(in.d_final_tail);
    g.dinitial_tail = Call::TailOf(out.dinitial_tail);
    ForTaken(definition, [&](const Tensor& tensor, const Taken& taken) {
      PlaceTensor(call, tensor, ConstTensorView(out.*taken.gradient), taken.gradient_place, g);
    });
    ChooseMethod(definition, in.initial.present() || in.d_final.present() || out.dinitial.present(), p);
    AddOthers(call);
    scan::Choose(op, ctx, p, engine::Pass::kBackward).backward(ctx, p, g);
  }
  for (const Tensor& tensor : definition.tensors) {
    const TensorView& t = out.*tensor.gradient;
    const std::string axes = AxesOf(tensor, t.rank());
    if (t.present() && IsOverTokens(axes)) ClearOthers(call, t, axes);
  }
}

void Step(const char* op, Context& ctx, const Definition& definition, const StepInputs& in, const Options&,
          const StepState& state, const TensorView& o) {
  const os::ScopedFloatControl float_control;
  Inputs whole;
  const Tensor& first = definition.tensors[0];
  const ConstTensorView& scanned = in.*first.input;
  const bool has_axes = scanned.present() && scanned.rank() >= 2;
  const int64_t batch = has_axes ? scanned.size(0) : -1, channels = has_axes ? scanned.size(1) : -1;
  for (const Tensor& tensor : definition.tensors) {
    whole.*tensor.input = OneToken(op, tensor, in.*tensor.input, batch, channels);
  }
  thread_local Call call;  // its memory is reused by the next step
  call.Check(op, &ctx, definition, whole, {}, true);
  scan::Problem& p = call.problem;
  mechanism::Apart apart = Readers(definition, whole, {});
  for (const StateTensor& of : definition.states()) {
    const std::string name = NameOf(definition, "state", of);
    if (!(state.*of.step).present()) Fail(op, name.c_str(), "is absent", "a tensor");
  }
  ForStates(op, call, definition, "state", "is given", state, &StateTensor::step,
            [&](const std::string& name, const TensorView& t, const Axes& shape) {
              apart.Writes(op, name.c_str(), t, shape, StateDType(p.dtype));
            });
  Tensor of_o = first;
  of_o.name = "o";
  if (!o.present()) Fail(op, "o", "is absent", "a tensor");
  const ConstTensorView out = OneToken(op, of_o, o, batch, channels);
  apart.Writes(op, "o", {const_cast<void*>(out.data()), out.dtype(), out.sizes(), out.strides(), out.device()},
               call.shape, p.dtype);
  if (definition.kernels != nullptr) {
    return definition.kernels->step(ctx, definition, call, whole, state.state, out);
  }
  p.o = call.TokensOf(out);
  p.initial = p.final = Call::StatesOf(state.state);
  p.initial_tail = p.final_tail = Call::TailOf(state.tail);
  scan::Choose(op, ctx, p).forward(ctx, p);
}

double FlopsOf(const Definition& definition, const AxisSizes& sizes, int64_t tokens, bool backward) {
  const auto channels = static_cast<double>(sizes.D);
  if (definition.kernels != nullptr) {
    return (backward ? 3 : 1) * definition.flops * channels * static_cast<double>(sizes.W * tokens);
  }
  if (definition.rule == scan::Rule::kTaps) {
    return channels * scan::Operations(sizes.L, tokens, backward);
  }
  const int64_t states = std::string_view(definition.state_axes) == "BD" ? 1 : sizes.N;
  const int64_t pairs = definition.rule == scan::Rule::kHeads ? sizes.d : 1;  // per channel
  return (backward ? 3 : 1) * definition.flops * channels * static_cast<double>(states * pairs * tokens);
}

int64_t Workspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                  const Options& options) {
  Call call(op, nullptr, definition, in, options, false);
  if (definition.kernels != nullptr) {
    return definition.kernels->workspace(ctx, definition, call, in, false);
  }
  int64_t most = 0;
  for (const bool states : {false, true}) {  // not known here, so takes the larger
    ChooseMethod(definition, states, call.problem);
    const scan::Kernel& kernel = scan::Choose(op, ctx, call.problem);
    most = std::max(most, kernel.workspace(ctx, call.problem) * ctx.num_threads());
  }
  return most;
}

int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                          const Options& options) {
  Call call(op, nullptr, definition, in, options, false);
  if (definition.kernels != nullptr) {
    return definition.kernels->workspace(ctx, definition, call, in, true);
  }
  int64_t most = 0;
  for (const bool states : {false, true}) {
    ChooseMethod(definition, states, call.problem);
    const auto bytes =
        scan::Choose(op, ctx, call.problem, engine::Pass::kBackward).backward_workspace(ctx, call.problem);
    most = std::max(most, bytes.per_thread * ctx.num_threads() + bytes.shared);
  }
  return most;
}

Explanation Explain(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                    const Options& options) {
  Call call(op, nullptr, definition, in, options, false);
  const scan::Problem& p = call.problem;
  Explanation e;
  e.target = TargetName(ctx.allowed_targets());
  if (definition.kernels != nullptr) {
    definition.kernels->explain(in, e);
    e.workspace_bytes = definition.kernels->workspace(ctx, definition, call, in, false);
  } else {
    ChooseMethod(definition, in.initial.present(), call.problem);
    const scan::Kernel& kernel = scan::Choose(op, ctx, p);
    e.kernel = kernel.name;
    e.target = kernel.target(ctx);
    e.why = kernel.why;
    e.workspace_bytes = kernel.workspace(ctx, p) * ctx.num_threads();
  }
  e.flops = 0;
  for (const scan::Sequence& s : p.sequences) {
    e.flops += FlopsOf(definition, call.sizes, s.count, false);
  }
  e.bytes = mechanism::Bytes(in.*definition.tensors[0].input);  // o
  for (const StateTensor& state : definition.states()) e.bytes += mechanism::Bytes(in.*state.initial);
  for (const Tensor& tensor : definition.tensors) e.bytes += mechanism::Bytes(in.*tensor.input);
  return e;
}

}  // namespace heed::scanning
