// Calls of mechanisms on the scan engine: their sizes, conversion to the engine's problem, and runs.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/device_name.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/scan/convolution.h"
#include "heed/engines/scan/kernels.h"
#include "heed/engines/scan/tasks.h"
#include "heed/mechanism/passes-inl.h"
#include "heed/mechanism/scanning_internal.h"

namespace heed::scanning {
namespace {

using mechanism::Fail;
using scan::Gradients;
using scan::Problem;

// A member of the engine's problem, by its type: tokens, numbers of channels, or weights, which are either.
template <class Owner>
using Member = std::variant<scan::Tokens Owner::*, scan::Numbers Owner::*, scan::Weights Owner::*>;

// The members of the engine's problem, and of its gradients, for a role.
struct Place {
  Role role;
  Member<Problem> in;
  Member<Gradients> out;
};
constexpr Place kPlaces[] = {
    {Role::kInput, &Problem::x, &Gradients::dx},
    {Role::kQuery, &Problem::x, &Gradients::dx},
    {Role::kKey, &Problem::key, &Gradients::dkey},
    {Role::kValue, &Problem::value, &Gradients::dvalue},
    {Role::kLogDecay, &Problem::log_decay, &Gradients::dlog_decay},
    {Role::kStep, &Problem::delta, &Gradients::ddelta},
    {Role::kStepBias, &Problem::bias, &Gradients::dbias},
    {Role::kRate, &Problem::A, &Gradients::dA},
    {Role::kInputWeights, &Problem::B, &Gradients::dB},
    {Role::kOutputWeights, &Problem::C, &Gradients::dC},
    {Role::kSkip, &Problem::skip, &Gradients::dskip},
    {Role::kOutputGate, &Problem::gate, &Gradients::dgate},
    {Role::kInputGate, &Problem::input_gate, &Gradients::dinput_gate},
    {Role::kRecurrenceGate, &Problem::recurrence_gate, &Gradients::drecurrence_gate},
    {Role::kLambda, &Problem::lambda, &Gradients::dlambda},
    {Role::kLogStep, &Problem::log_dt, &Gradients::dlog_dt},
    {Role::kLogRate, &Problem::log_A_real, &Gradients::dlog_A_real},
    {Role::kFrequency, &Problem::A_imag, &Gradients::dA_imag},
    {Role::kTaps, &Problem::taps, &Gradients::dtaps},
    {Role::kKeyTaps, &Problem::key_taps, &Gradients::dkey_taps},
    {Role::kKeySkip, &Problem::key_skip, &Gradients::dkey_skip},
};

const Place& PlaceOf(const Tensor& tensor) { return *std::ranges::find(kPlaces, tensor.role, &Place::role); }

// [B, D, T], [B, T, D], [B, G, N, T], [B, T, H, d] or, of keys before a sequence, [B, W - 1, H, d]: columns are
// channels or the states of a group, and heads are groups. Strides of axes of size 1 are set as if the tensor were
// contiguous.
scan::Tokens TokensOf(const ConstTensorView& t, std::string_view axes, bool reverse) {
  if (!t.present()) return {};
  scan::Tokens of = {t.data(), t.dtype()};
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t stride = t.stride(static_cast<int>(i));
    switch (axes[i]) {
      case 'B': of.batch = stride; break;
      case 'T': of.token = reverse ? -stride : stride; break;
      case 'w': of.token = stride; break;
      case 'G':
      case 'H': of.group = stride; break;
      default: of.column = stride;
    }
  }
  if (axes.back() != 'd') return of;
  const int64_t heads = t.size(2), channels = t.size(3);
  if (channels == 1) of.column = t.stride(2);
  if (heads == 1) of.group = channels * of.column;
  return of;
}

// [D, N, 2], and shorter.
scan::Numbers NumbersOf(const ConstTensorView& t) {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), 0, t.stride(0), t.rank() > 1 ? t.stride(1) : 0, t.rank() > 2 ? t.stride(2) : 0};
}

// [B, D, N, 2], and shorter, whose missing axes have a stride of 0; or [B, H, d, d, N, 2].
scan::Numbers StatesOf(const ConstTensorView& t) {
  if (!t.present()) return {};
  if (t.rank() == 6) {
    return {t.data(), t.dtype(), t.stride(0), t.stride(1), t.stride(4), t.stride(5), t.stride(2), t.stride(3)};
  }
  return {
      t.data(), t.dtype(), t.stride(0), t.stride(1), t.rank() > 2 ? t.stride(2) : 0, t.rank() > 3 ? t.stride(3) : 0};
}

template <class Owner>
void PlaceTensor(const Tensor& tensor, const ConstTensorView& t, bool reverse, const Member<Owner>& member, Owner& in) {
  if (!t.present()) return;
  const std::string_view axes = mechanism::AxesOfRank(tensor.axes, t.rank());
  if (const auto* tokens = std::get_if<scan::Tokens Owner::*>(&member)) {
    in.** tokens = TokensOf(t, axes, reverse);
  } else if (const auto* numbers = std::get_if<scan::Numbers Owner::*>(&member)) {
    in.** numbers = NumbersOf(t);
  } else {
    scan::Weights& weights = in.*std::get<scan::Weights Owner::*>(member);
    if (axes[0] == 'B') {
      weights.tokens = TokensOf(t, axes, reverse);
    } else {
      weights.constants = NumbersOf(t);
    }
  }
}

// Sets the members for the state and for the tail.
template <class View>
void PlaceStates(const Definition& definition, std::span<const View> views, scan::Numbers& state, scan::Tokens& tail) {
  for (size_t i = 0; i < views.size(); ++i) {
    if (definition.table.states[i].role == StateTensor::kTail) {
      tail = TokensOf(views[i], definition.table.states[i].axes, false);
    } else {
      state = StatesOf(views[i]);
    }
  }
}

// True if a state that is no tail is present.
template <class View>
bool HasState(const Definition& definition, std::span<const View> views) {
  for (size_t i = 0; i < views.size(); ++i) {
    if (definition.table.states[i].role != StateTensor::kTail && views[i].present()) return true;
  }
  return false;
}

// A convolution does not compute intermediate states, so a call with an initial or a requested final state uses the
// recurrence.
void ChooseMethod(const Definition& definition, bool states, Problem& p) {
  if (p.rule != scan::Rule::kModes && p.rule != scan::Rule::kHeads) return;
  const bool cheaper = definition.method == scan::Method::kAuto && scan::PrefersTaps(p);
  p.has_taps = !states && (cheaper || definition.method == scan::Method::kConvolution);
  if (p.has_taps) p.num_taps = scan::MostTokens(p);
}

}  // namespace

// Throws for a strict context if neither tokens nor columns are contiguous, so that elements would be gathered one by
// one.
void Call::CheckLayout(const char* op, const Context* checks, const char* name, const ConstTensorView& t,
                       std::string_view axes) const {
  const size_t at = axes.find('T');
  if (checks == nullptr || !checks->strict() || !gathers_allowed || at == std::string_view::npos) return;
  const auto token = static_cast<int>(at);
  const int column = token == t.rank() - 1 ? token - 1 : t.rank() - 1;
  const bool has_columns = (std::abs(t.stride(column)) == 1 && t.size(column) > 1) ||
                           (column == 3 && t.size(3) == 1 && std::abs(t.stride(2)) == 1);
  if (t.size(token) <= 1 || std::abs(t.stride(token)) == 1 || has_columns) return;
  throw Unsupported(std::string(op) + ": " + name +
                    ": neither tokens nor channels are contiguous, so that they would be gathered "
                    "one by one, which a strict Context forbids");
}

void Call::CheckSizes(const char* op, const Definition& definition, const Arguments& in) {
  if (sizes.H >= 0 && sizes.d >= 0) sizes.D = sizes.H * sizes.d;
  sizes.w = sizes.W - 1;
  for (const Tensor& tensor : definition.table.tensors) {
    const ConstTensorView& t = mechanism::At(in.tensors, definition.table.IndexOf(tensor));
    if (!t.present()) continue;
    const std::string_view axes = mechanism::AxesOfRank(tensor.axes, t.rank());
    const auto has = [&](char letter) { return axes.find(letter) != std::string_view::npos; };
    const auto fail = [&](const std::string& more) {
      Fail(op, tensor.name, "has shape " + t.ShapeString(), mechanism::Described(tensor.axes, &AxisName) + more);
    };
    if (has('W') && sizes.W == 0) fail(" with W >= 1");
    const bool groups = has('G') && (sizes.G == 0 || sizes.D % std::max<int64_t>(sizes.G, 1) != 0);
    if ((axes == "BNT" && sizes.G != 1) || groups || (has('N') && sizes.N == 0)) {
      fail(", N >= 1, G >= 1 dividing D = " + std::to_string(sizes.D) +
           (sizes.G > 1 ? ", G = " + std::to_string(sizes.G) : ""));
    }
    if (has('L') && sizes.L > sizes.T) fail(" with L <= T = " + std::to_string(sizes.T));
  }
}

void Call::Check(const char* op, const Context* checks, const Definition& definition, const Arguments& in,
                 const Options& options, bool data) {
  if (definition.rule == scan::Rule::kGates && (!(definition.c > 0) || std::isinf(definition.c))) {
    Fail(op, "c", "is " + mechanism::Text(definition.c), "a positive number");
  }
  ReadSizes(op, definition.table, in, &AxisName, false);
  if (definition.kernels != nullptr && !on_cpu()) {
    throw Unsupported(std::string(op) + ": computes on the CPU alone, not on " + heed::NameOf(device));
  }
  CheckSizes(op, definition, in);
  CheckTensors(op, definition.table, in, data, false, checks != nullptr && checks->checks());
  gathers_allowed = definition.kernels == nullptr;
  for (const Tensor& tensor : definition.table.tensors) {
    const ConstTensorView& t = mechanism::At(in.tensors, definition.table.IndexOf(tensor));
    if (t.present()) CheckLayout(op, checks, tensor.name, t, mechanism::AxesOfRank(tensor.axes, t.rank()));
  }
  if (sizes.N < 0) sizes.N = 1;
  if (sizes.G < 0) sizes.G = 1;
  reverse = options.reverse;
  o_axes = definition.o_axes();
  for (size_t i = 0; i < definition.table.states.size(); ++i) has_state[i] = true;
  FindSequences(op, definition.table, in, options, data, 0);
  CheckInitialStates(op, definition.table, in, data);

  std::vector<scan::Sequence> sequences = std::move(problem.sequences);
  sequences.clear();
  problem = {};
  problem.sequences = std::move(sequences);
  const bool heads = definition.rule == scan::Rule::kHeads;
  problem.dtype = dtype;
  problem.device = device;
  problem.rule = definition.rule;
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
                                 reverse ? 1 - ranges[i].end : ranges[i].begin, ranges[i].end - ranges[i].begin});
  }
  if (definition.kernels != nullptr) return;
  for (const Tensor& tensor : definition.table.tensors) {
    PlaceTensor(tensor, mechanism::At(in.tensors, definition.table.IndexOf(tensor)), reverse, PlaceOf(tensor).in,
                problem);
  }
  PlaceStates(definition, in.initial, problem.initial, problem.initial_tail);
}

void Call::AddOtherTokens() {
  if (on_cpu()) return;
  ForOtherTokens([&](int64_t b, int64_t first, int64_t count) { problem.others.push_back({b, 0, first, count}); });
}

void Call::Forward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                   const Results& out) {
  if (definition.kernels != nullptr) return definition.kernels->forward(op, ctx, definition, *this, in, out);
  problem.o = TokensOf(out.o, o_axes, reverse);
  PlaceStates(definition, out.states, problem.final, problem.final_tail);
  ChooseMethod(definition, HasState(definition, in.initial) || HasState(definition, out.states), problem);
  AddOtherTokens();
  scan::Choose(op, ctx, problem).forward(ctx, problem);
}

void Call::Backward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                    const Results& out) {
  if (definition.kernels != nullptr) return definition.kernels->backward(op, ctx, definition, *this, in, out);
  Gradients g;
  g.d_o = TokensOf(in.d_o, o_axes, reverse);
  PlaceStates(definition, in.d_final, g.d_final, g.d_final_tail);
  PlaceStates(definition, out.states, g.dinitial, g.dinitial_tail);
  for (size_t i = 0; i < out.gradients.size(); ++i) {
    PlaceTensor(definition.table.tensors[i], out.gradients[i], reverse, PlaceOf(definition.table.tensors[i]).out, g);
  }
  ChooseMethod(definition,
               HasState(definition, in.initial) || HasState(definition, in.d_final) || HasState(definition, out.states),
               problem);
  AddOtherTokens();
  scan::Choose(op, ctx, problem, engine::Pass::kBackward).backward(ctx, problem, g);
}

void Call::Step(const char* op, Context& ctx, const Definition& definition, const Arguments& in, const Results& out) {
  if (definition.kernels != nullptr) return definition.kernels->step(ctx, definition, *this, in, out);
  problem.o = TokensOf(out.o, o_axes, reverse);
  PlaceStates(definition, out.states, problem.final, problem.final_tail);
  problem.initial = problem.final;
  problem.initial_tail = problem.final_tail;
  scan::Choose(op, ctx, problem).forward(ctx, problem);
}

int64_t Call::ForwardBytes(const char* op, const Context& ctx, const Definition& definition,
                           const Arguments& in) const {
  if (definition.kernels != nullptr) return definition.kernels->workspace(ctx, definition, *this, in, false);
  int64_t most = 0;
  for (const bool states : {false, true}) {  // not known here, so takes the larger
    Problem p = problem;
    ChooseMethod(definition, states, p);
    most = std::max(most, scan::Choose(op, ctx, p).workspace(ctx, p) * ctx.num_threads());
  }
  return most;
}

int64_t Call::BackwardBytes(const char* op, const Context& ctx, const Definition& definition,
                            const Arguments& in) const {
  if (definition.kernels != nullptr) return definition.kernels->workspace(ctx, definition, *this, in, true);
  int64_t most = 0;
  for (const bool states : {false, true}) {
    Problem p = problem;
    ChooseMethod(definition, states, p);
    const auto bytes = scan::Choose(op, ctx, p, engine::Pass::kBackward).backward_workspace(ctx, p);
    most = std::max(most, bytes.per_thread * ctx.num_threads() + bytes.shared);
  }
  return most;
}

void Call::Explain(const char* op, const Context& ctx, const Definition& definition, const Arguments& in,
                   Explanation& e) const {
  e.flops = 0;
  for (const scan::Sequence& s : problem.sequences) e.flops += FlopsOf(definition, sizes, s.count, false);
  e.target = TargetName(ctx.allowed_targets());
  if (definition.kernels != nullptr) return definition.kernels->explain(in, e);
  Problem p = problem;
  ChooseMethod(definition, HasState(definition, in.initial), p);
  const scan::Kernel& kernel = scan::Choose(op, ctx, p);
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = kernel.why;
}

mechanism::Division Call::DivisionOf(const Definition& definition, const Arguments& /*in*/) const {
  constexpr int64_t kChannels = 16;  // of a task
  if (definition.kernels != nullptr || definition.rule == scan::Rule::kHeads) return {};
  const double states = problem.rule == scan::Rule::kModes ? 0.5 : 1;  // half of the products, or hardly less work
  return {(problem.channels + kChannels - 1) / kChannels, 1, states, states};
}

double FlopsOf(const Definition& definition, const AxisSizes& sizes, int64_t tokens, bool backward) {
  const auto channels = static_cast<double>(sizes.D);
  if (definition.kernels != nullptr) {
    return (backward ? 3 : 1) * definition.flops * channels * static_cast<double>(sizes.W * tokens);
  }
  if (definition.rule == scan::Rule::kTaps) {
    return channels * scan::Operations(sizes.L, tokens, backward);
  }
  const bool is_one = definition.rule == scan::Rule::kDecay || definition.rule == scan::Rule::kGates;
  const int64_t states = is_one ? 1 : sizes.N;
  const int64_t pairs = definition.rule == scan::Rule::kHeads ? sizes.d : 1;  // per channel
  return (backward ? 3 : 1) * definition.flops * channels * static_cast<double>(states * pairs * tokens);
}

}  // namespace heed::scanning

template struct heed::mechanism::Passes<heed::scanning::Definition>;
