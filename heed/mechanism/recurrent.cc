// Calls of recurrent mechanisms: checks, conversion to the recurrence engine's problem, and runs.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/device_name.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::recurrent {
namespace {

using mechanism::Apart;
using mechanism::CheckTensor;
using mechanism::Fail;
using recurrence::Gate;
using recurrence::Problem;

// A checked call.
struct Call {
  Problem problem;
  std::vector<TokenRange> ranges;
  AxisSizes sizes;
  Axes o_shape;
  std::array<StateTensor, 3> states;
  std::array<Axes, 3> state_shapes;
  bool reverse, value_first;
  DType o_dtype, dv_dtype;  // d_o has the dtype of o

  // Resets everything except the memory of lists.
  void Reset() {
    std::vector<recurrence::Sequence> sequences = std::move(problem.sequences);
    sequences.clear();
    problem = {};
    problem.sequences = std::move(sequences);
    ranges.clear();
    decays_f64.clear();
    decays_f32.clear();
  }
  std::vector<double> decays_f64;  // constants of heads, converted from any dtype
  std::vector<float> decays_f32;
};

Device DeviceOf(const Inputs& in) { return in.q.device().type == DeviceType::kCuda ? in.q.device() : Device(); }

recurrence::Rows RowsOf(const Call& call, const ConstTensorView& t) {
  const int64_t step = call.reverse ? -1 : 1;
  if (!t.present()) return {};
  if (t.rank() <= 2) return {t.data(), t.dtype(), 0, 0, t.stride(0)};  // over heads only
  return {t.data(), t.dtype(), t.stride(0), step * t.stride(1), t.stride(2)};
}

// Rows of a tensor [B, T, n, H, ...].
recurrence::Rows WritesOf(const Call& call, const ConstTensorView& t) {
  recurrence::Rows rows = RowsOf(call, t);
  if (!t.present()) return rows;
  rows.write_stride = t.stride(2);
  rows.head_stride = t.stride(3);
  return rows;
}

// A matrix with contiguous rows.
recurrence::Rows MatrixOf(const ConstTensorView& t) { return {t.data(), t.dtype(), 0, t.stride(0), 0}; }

recurrence::Rows KeptDecays(Call& call, const ConstTensorView& t) {
  if (t.data() == nullptr) return {};
  const int64_t row = t.rank() == 2 ? t.size(1) : 1;
  for (int64_t h = 0; h < t.size(0); ++h) {
    for (int64_t i = 0; i < row; ++i) {
      const int64_t at = h * t.stride(0) + (t.rank() == 2 ? i * t.stride(1) : 0);
      call.decays_f64.push_back(LoadAsDouble(t.dtype(), t.data(), at));
    }
  }
  call.decays_f32.assign(call.decays_f64.begin(), call.decays_f64.end());
  if (call.problem.dtype == DType::kF64) {
    return {call.decays_f64.data(), DType::kF64, 0, 0, row};
  }
  return {call.decays_f32.data(), DType::kF32, 0, 0, row};
}

recurrence::States StatesOf(const Call& call, const ConstTensorView& t) {
  if (!t.present()) return {};
  if (call.value_first && t.rank() == 4) {
    return {t.data(), t.stride(0), t.stride(1), t.stride(3), t.stride(2)};
  }
  return {t.data(), t.stride(0), t.stride(1), t.rank() > 2 ? t.stride(2) : 0, t.rank() == 4 ? t.stride(3) : 0};
}

// Names of the parts of a state in messages, in fixed memory, since a step allocates nothing.
class StateNames {
 public:
  StateNames(const Definition& definition, const char* state) {
    const std::array<StateTensor, 3> states = StateTensors(definition);
    const bool several = states[1].exists || states[2].exists;
    for (size_t i = 0; i < 3; ++i) {
      const char* const part = definition.state_names[i];
      std::snprintf(names_[i], sizeof(names_[i]), "%s%s", state, several && part[0] == '\0' ? ".S" : part);
    }
  }
  const char* operator[](size_t i) const { return names_[i]; }

 private:
  char names_[3][32];
};

const ConstTensorView& ViewOf(const StateTensor& s, const ConstState& of) { return of.*s.read; }
const TensorView& ViewOf(const StateTensor& s, const State& of) { return of.*s.written; }

// Calls f(name, view, shape) for the given states; throws for states that the call does not have.
template <class States, class F>
void ForStates(const char* op, const Call& call, const Definition& definition, const char* what, const char* verb,
               const States& given, const F& f) {
  const StateNames names(definition, what);
  for (size_t i = 0; i < 3; ++i) {
    const auto& t = ViewOf(call.states[i], given);
    if (!t.present()) continue;
    if (!call.states[i].exists) Fail(op, names[i], verb, "none: this call has no such state");
    f(names[i], t, call.state_shapes[i]);
  }
}

void CheckCall(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
               const Options& options, bool data, Call& call) {
  call.Reset();
  for (const double eps : {definition.eps, definition.feature_eps}) {
    if (!(eps >= 0) || std::isinf(eps)) {
      Fail(op, "eps", "is " + mechanism::Text(eps), "a finite number >= 0");
    }
  }
  Problem& p = call.problem;
  const char *query_name = definition.query_name, *value_name = definition.value_name;
  if (!in.q.present()) Fail(op, query_name, "is absent", "a tensor");
  const bool several = definition.several_writes, channels = definition.channels;
  if (in.q.rank() != (channels ? 3 : 4)) {
    Fail(op, query_name, "has shape " + in.q.ShapeString(), channels ? "rank 3: [B, T, C]" : "rank 4: [B, T, H, K]");
  }
  if (!IsFloat(in.q.dtype())) {
    Fail(op, query_name, std::string("has dtype ") + Name(in.q.dtype()), "f64, f32, bf16 or f16");
  }
  if (!in.v.present()) Fail(op, value_name, "is absent", "a tensor");
  if (in.v.rank() != (several ? 5 : channels ? 3 : 4)) {
    Fail(op, value_name, "has shape " + in.v.ShapeString(),
         several    ? "rank 5: [B, T, n, HV, V]"
         : channels ? "rank 3: [B, T, C]"
                    : "rank 4: [B, T, HV, V]");
  }
  p.dtype = in.q.dtype();
  p.device = DeviceOf(in);
  const int64_t B = in.q.size(0), T = in.q.size(1), H = in.q.size(2), K = KeySize(in);
  const int64_t HV = ValueHeads(in), V = ValueSize(in);
  p.writes = several ? in.v.size(2) : 1;
  call.reverse = options.reverse;
  call.value_first = definition.value_first;
  const Surroundings* around = definition.surroundings;
  call.o_dtype = around != nullptr && around->wide_o ? StateDType(p.dtype) : p.dtype;
  call.dv_dtype = around != nullptr && around->wide_dv ? StateDType(p.dtype) : p.dtype;
  const ConstTensorView& W = in.projection;
  const bool random = recurrence::IsRandom(definition.feature);
  if (random && W.present() && (W.rank() != 2 || W.size(0) < 1 || W.size(1) != K)) {
    Fail(op, "projection", "has shape " + W.ShapeString(), "[M, K = " + std::to_string(K) + "], M >= 1");
  }
  call.sizes = {
      .B = B, .T = T, .N = p.writes, .G = HV, .H = H, .K = K, .V = V, .M = random && W.present() ? W.size(0) : 0};
  call.o_shape = channels ? Axes{B, T, HV} : Axes{B, T, HV, V};
  if (K < 1) Fail(op, query_name, "has shape " + in.q.ShapeString(), "K >= 1");
  if (V < 1) Fail(op, value_name, "has shape " + in.v.ShapeString(), "V >= 1");
  if (p.writes < 1) Fail(op, value_name, "has shape " + in.v.ShapeString(), "n >= 1");
  if (!channels && (H < 1 ? HV != 0 : HV % H != 0 || HV == 0)) {
    Fail(op, value_name, "has " + std::to_string(HV) + " heads",
         "a multiple of the " + std::to_string(H) + " heads of " + query_name);
  }

  const bool given = around == nullptr || !around->prepare;
  for (const Tensor& tensor : Tensors(definition)) {
    const ConstTensorView& t = in.*tensor.input;
    if (!t.present() && tensor.optional) continue;
    const bool own = (tensor.type == Tensor::kAnyFloat && IsFloat(t.dtype())) ||
                     (tensor.type != Tensor::kSame && t.dtype() == StateDType(p.dtype));
    const bool on_host = tensor.values == Tensor::kDecays && !tensor.over_tokens();
    CheckTensor(op, tensor.name, t, ShapeOf(tensor.axes, call.sizes), own ? t.dtype() : p.dtype, data,
                on_host ? Device() : p.device);
    if (tensor.contiguous_rows()) mechanism::CheckContiguousRows(op, tensor.name, t);
    if (tensor.values == Tensor::kDecays && given && checks != nullptr && checks->checks() && t.data() != nullptr &&
        t.device().type == DeviceType::kCpu) {
      mechanism::CheckNotPositive(op, tensor.name, t);
    }
  }
  for (const Tensor& tensor : Tensors::NotOf(definition)) {
    if ((in.*tensor.input).present()) Fail(op, tensor.name, "is given", "none");
  }

  p.key_heads = std::max<int64_t>(H, 1);
  p.value_heads = HV;
  if (random) {
    p.projection = MatrixOf(W);
    p.projection_rows = W.size(0);
    const bool is_floored = definition.feature == recurrence::Feature::kRandomExp && !definition.causal;
    p.feature_eps = is_floored ? definition.feature_eps : 0;
  }
  p.key_size = K;
  p.value_size = V;
  p.feature = definition.feature;
  p.key_feature = definition.key_feature.value_or(definition.feature);
  p.causal = definition.causal;
  p.normalize = definition.normalize;
  p.eps = definition.eps;
  p.complement_keys = definition.complement_keys;
  if (channels && options.scale) Fail(op, "scale", "is given", "none: there is no query");
  p.scale = options.scale.value_or(definition.root_scale ? 1 / std::sqrt(static_cast<double>(K)) : 1);
  if (!std::isfinite(p.scale)) {
    Fail(op, "scale", "is " + mechanism::Text(p.scale), "a finite number");
  }

  const bool by_key = definition.decay == DecayShape::kKey || definition.decay == DecayShape::kHeadKey;
  p.gate = definition.decay == DecayShape::kNone || (several && !in.log_decay.present()) ? Gate::kNone
           : by_key                                                                      ? Gate::kKey
                                                                                         : Gate::kScalar;
  p.constant_decay = IsConstant(definition.decay);
  p.has_value_decay = in.log_decay_v.present();
  p.has_bonus = definition.bonus;

  mechanism::Ranges(op, query_name, in.q, 1, options, data, call.ranges);
  const auto sequences = static_cast<int64_t>(call.ranges.size());
  for (int64_t i = 0; i < sequences; ++i) {
    const TokenRange& range = call.ranges[static_cast<size_t>(i)];
    // With `reverse`, strides are negative and tokens count from the end.
    p.sequences.push_back({range.batch, i, options.reverse ? 1 - range.end : range.begin, range.end - range.begin});
  }
  call.states = StateTensors(definition);
  AxisSizes of_states = call.sizes;
  of_states.B = sequences;
  of_states.F = p.features();
  for (size_t i = 0; i < 3; ++i) call.state_shapes[i] = ShapeOf(call.states[i].axes, of_states);
  p.exp_gates = definition.exp_gates;
  p.channels = channels;
  if (p.running_max()) p.gate = Gate::kScalar;

  p.q = RowsOf(call, in.q);
  const auto rows_of = several ? &WritesOf : &RowsOf;
  p.k = rows_of(call, in.k);
  p.v = rows_of(call, in.v);
  p.input_gate = RowsOf(call, in.i);
  p.forget_gate = RowsOf(call, in.f);
  p.log_decay = p.constant_decay ? KeptDecays(call, in.log_decay) : RowsOf(call, in.log_decay);
  p.log_value_decay = RowsOf(call, in.log_decay_v);
  p.bonus = RowsOf(call, in.u);
  p.delta = definition.delta;
  p.read_key = RowsOf(call, definition.read_key ? in.p : in.a);
  p.write_key = RowsOf(call, in.b);
  p.beta = rows_of(call, in.beta);
  p.erase = RowsOf(call, in.erase);
  p.write = RowsOf(call, in.write);
  if (around != nullptr) {
    p.value_factors = RowsOf(call, around->value_factors);
    p.output_gate = RowsOf(call, around->output_gate);
    const ConstTensorView& mask = around->key_mask;
    if (mask.present()) p.key_mask = {mask.data(), mask.dtype(), mask.stride(0), mask.stride(1), 0};
    const ConstTensorView& skip = around->skip;
    if (skip.present()) p.skip = {skip.data(), skip.dtype(), 0, 0, skip.stride(0)};
  }
  ForStates(op, call, definition, "initial_state", "is given", in.initial,
            [&](const char* name, const ConstTensorView& t, const Axes& shape) {
              CheckTensor(op, name, t, shape, StateDType(p.dtype), data, p.device);
            });
  if (p.running_max() && in.initial.S.present() && !in.initial.m.present()) {
    Fail(op, StateNames(definition, "initial_state")[2], "is absent", "a tensor, which the others are relative to");
  }
  p.initial = StatesOf(call, in.initial.S);
  p.initial_z = StatesOf(call, in.initial.z);
  p.initial_m = StatesOf(call, in.initial.m);
}

Call CheckedCall(const char* op, const Context* checks, const Definition& definition, const Inputs& in,
                 const Options& options, bool data) {
  Call call;
  CheckCall(op, checks, definition, in, options, data, call);
  return call;
}

// All inputs, for the overlap checks of outputs.
Apart Readers(const Definition& definition, const Inputs& in, const Options& options) {
  Apart apart(DeviceOf(in));
  for (const Tensor& tensor : Tensors(definition)) apart.Reads(tensor.name, in.*tensor.input);
  const StateNames names(definition, "initial_state");
  apart.Reads(names[0], in.initial.S);
  apart.Reads(names[1], in.initial.z);
  apart.Reads(names[2], in.initial.m);
  apart.Reads("lengths", options.lengths);
  apart.Reads("starts", options.starts);
  apart.Reads("cu_seqlens", options.cu_seqlens);
  return apart;
}

// Checks rows of o, and of a step's states, which are written in place.
void CheckRows(const char* op, const char* name, const TensorView& t, const Axes& shape, DType dtype, Apart& apart) {
  apart.Writes(op, name, t, shape, dtype);
  mechanism::CheckContiguousRows(op, name, t);
}

// Adds tokens that belong to no sequence.
void AddOthers(Call& call, int64_t B, int64_t T) {
  mechanism::ForOthers(call.ranges, B, T, [&](int64_t b, int64_t begin, int64_t end) {
    call.problem.others.push_back({b, 0, call.reverse ? 1 - end : begin, end - begin});
  });
}

void Prepare(const Definition& definition) {
  if (definition.surroundings != nullptr && definition.surroundings->prepare) {
    definition.surroundings->prepare();
  }
}

}  // namespace

void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in, const Options& options,
             const Outputs& out) {
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  Call call = CheckedCall(op, &ctx, definition, in, options, true);
  Problem& p = call.problem;
  Apart apart = Readers(definition, in, options);
  CheckRows(op, "o", out.o, call.o_shape, call.o_dtype, apart);
  ForStates(op, call, definition, "final_state", "is asked for", out.final,
            [&](const char* name, const TensorView& t, const Axes& shape) {
              apart.Writes(op, name, t, shape, StateDType(p.dtype));
            });
  p.o = RowsOf(call, out.o);
  p.final = StatesOf(call, out.final.S);
  p.final_z = StatesOf(call, out.final.z);
  p.final_m = StatesOf(call, out.final.m);
  const auto& kernel = recurrence::Choose(op, ctx, p);
  Prepare(definition);
  if (p.device.type != DeviceType::kCpu) {
    AddOthers(call, in.q.size(0), in.q.size(1));
    return kernel.forward(ctx, p);
  }
  kernel.forward(ctx, p);
  mechanism::ClearOthers(call.ranges, out.o);
}

void Backward(const char* op, Context& ctx, const Definition& definition, const BackwardInputs& in,
              const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  Call call = CheckedCall(op, &ctx, definition, in, options, true);
  Problem& p = call.problem;
  recurrence::Gradients g;
  CheckTensor(op, "d_o", in.d_o, call.o_shape, call.o_dtype, true, p.device);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  g.d_o = RowsOf(call, in.d_o);
  Apart apart = Readers(definition, in, options);
  apart.Reads("d_o", in.d_o);
  if (in.d_final.m.present()) {
    Fail(op, StateNames(definition, "d_state")[2], "is given", "none: it is a constant");
  }
  if (out.dinitial.m.present()) {
    Fail(op, StateNames(definition, "dinitial_state")[2], "is asked for", "none: it is a constant");
  }
  ForStates(op, call, definition, "d_state", "is given", in.d_final,
            [&](const char* name, const ConstTensorView& t, const Axes& shape) {
              CheckTensor(op, name, t, shape, StateDType(p.dtype), true, p.device);
              apart.Reads(name, t);
            });
  g.d_final = StatesOf(call, in.d_final.S);
  g.d_final_z = StatesOf(call, in.d_final.z);
  for (const Tensor& tensor : Tensors(definition)) {
    const TensorView& t = out.*tensor.gradient;
    if (!t.present()) continue;
    const std::string name = std::string("d") + tensor.name;
    const ConstTensorView& input = in.*tensor.input;
    if (!input.present()) Fail(op, name.c_str(), "is asked for", "none: there is no such input");
    const DType dtype = tensor.input == &Inputs::v ? call.dv_dtype : input.dtype();
    CheckTensor(op, name.c_str(), t, ShapeOf(tensor.axes, call.sizes), dtype, true, p.device);
    if (tensor.contiguous_rows() || t.rank() == 2) {
      mechanism::CheckContiguousRows(op, name.c_str(), t);
    }
    apart.Writes(op, name.c_str(), t);
  }
  for (const Tensor& tensor : Tensors::NotOf(definition)) {
    if (!(out.*tensor.gradient).present()) continue;
    Fail(op, (std::string("d") + tensor.name).c_str(), "is asked for", "none: there is no such input");
  }
  g.dq = RowsOf(call, out.dq);
  const auto rows_of = definition.several_writes ? &WritesOf : &RowsOf;
  g.dk = rows_of(call, out.dk);
  g.dv = rows_of(call, out.dv);
  g.d_log_decay = RowsOf(call, definition.exp_gates ? out.df : out.dlog_decay);
  g.d_input_gate = RowsOf(call, out.di);
  g.d_log_value_decay = RowsOf(call, out.dlog_decay_v);
  g.d_bonus = RowsOf(call, out.du);
  g.d_read_key = RowsOf(call, definition.read_key ? out.dp : out.da);
  g.d_write_key = RowsOf(call, out.db);
  g.d_beta = rows_of(call, out.dbeta);
  g.d_erase = RowsOf(call, out.derase);
  g.d_write = RowsOf(call, out.dwrite);
  if (out.dprojection.present()) g.d_projection = MatrixOf(out.dprojection);
  ForStates(op, call, definition, "dinitial_state", "is asked for", out.dinitial,
            [&](const char* name, const TensorView& t, const Axes& shape) {
              apart.Writes(op, name, t, shape, StateDType(p.dtype));
            });
  g.d_initial = StatesOf(call, out.dinitial.S);
  g.d_initial_z = StatesOf(call, out.dinitial.z);
  const auto& kernel = recurrence::Choose(op, ctx, p, engine::Pass::kBackward);
  Prepare(definition);
  if (p.device.type != DeviceType::kCpu) {
    AddOthers(call, in.q.size(0), in.q.size(1));
    return kernel.backward(ctx, p, g);
  }
  kernel.backward(ctx, p, g);
  for (const Tensor& tensor : Tensors(definition)) {
    if (tensor.over_tokens()) mechanism::ClearOthers(call.ranges, out.*tensor.gradient);
  }
}

void Step(const char* op, Context& ctx, const Definition& definition, const StepInputs& in, const Options& options,
          const State& state, const TensorView& o) {
  const os::ScopedFloatControl float_control;
  if (!definition.causal) Fail(op, "causal", "is false", "true: one token at a time");
  Inputs whole;
  for (const Tensor& tensor : Tensors(definition)) {
    const ConstTensorView& t = in.*tensor.step;
    whole.*tensor.input = tensor.over_tokens() ? mechanism::OneToken(op, tensor.name, t) : t;
  }
  Options scale;  // the only option of a step
  scale.scale = options.scale;
  thread_local Call call;  // its memory is reused by the next step
  CheckCall(op, &ctx, definition, whole, scale, true, call);
  Problem& p = call.problem;
  Apart apart = Readers(definition, whole, scale);
  const StateNames names(definition, "state");
  for (size_t i = 0; i < 3; ++i) {
    const TensorView& t = ViewOf(call.states[i], state);
    if (!call.states[i].exists) continue;
    if (!t.present()) Fail(op, names[i], "is absent", "a tensor");
    CheckRows(op, names[i], t, call.state_shapes[i], StateDType(p.dtype), apart);
  }
  p.final = StatesOf(call, state.S);
  if (call.states[1].exists) p.final_z = StatesOf(call, state.z);
  if (call.states[2].exists) p.initial_m = p.final_m = StatesOf(call, state.m);
  if (p.channels) {
    p.initial = p.final;
    p.initial_z = p.final_z;
  }
  const ConstTensorView out = mechanism::OneToken(op, "o", o);
  if (!out.present()) Fail(op, "o", "is absent", "a tensor");
  const TensorView writable(const_cast<void*>(out.data()), out.dtype(), out.sizes(), out.strides(), out.device());
  CheckRows(op, "o", writable, call.o_shape, p.dtype, apart);
  p.o = RowsOf(call, out);
  const auto& kernel = recurrence::Choose(op, ctx, p);
  Prepare(definition);
  kernel.step(ctx, p);
}

int64_t Workspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                  const Options& options) {
  const Call call = CheckedCall(op, nullptr, definition, in, options, false);
  return recurrence::Choose(op, ctx, call.problem).workspace(ctx, call.problem) * ctx.num_threads();
}

int64_t BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                          const Options& options) {
  const Call call = CheckedCall(op, nullptr, definition, in, options, false);
  const auto bytes =
      recurrence::Choose(op, ctx, call.problem, engine::Pass::kBackward).backward_workspace(ctx, call.problem);
  return bytes.per_thread * ctx.num_threads() + bytes.shared;
}

Explanation Explain(const char* op, const Context& ctx, const Definition& definition, const Inputs& in,
                    const Options& options) {
  const Call call = CheckedCall(op, nullptr, definition, in, options, false);
  const Problem& p = call.problem;
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, p);
  double tokens = 0;
  for (const TokenRange& range : call.ranges) {
    tokens += static_cast<double>(range.end - range.begin);
  }
  Explanation e;
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = kernel.why;
  e.bytes = 0;
  const double products = p.channels                                  ? kFlopsOfChannels
                          : p.delta == recurrence::Delta::kNone       ? 4
                          : p.delta == recurrence::Delta::kAfterDecay ? 6
                                                                      : 8;
  e.flops = products * tokens * static_cast<double>(p.writes) * static_cast<double>(p.value_heads) *
            static_cast<double>(p.features()) * static_cast<double>(p.value_size);
  e.flops += 4 * tokens * static_cast<double>(p.value_heads) * static_cast<double>(p.projection_rows) *
             static_cast<double>(p.key_size);
  for (const ConstTensorView* t : {&in.v, &in.initial.S, &in.initial.z}) e.bytes += mechanism::Bytes(*t);  // o, states
  for (const Tensor& tensor : Tensors(definition)) e.bytes += mechanism::Bytes(in.*tensor.input);
  e.workspace_bytes = kernel.workspace(ctx, p) * ctx.num_threads();
  return e;
}

}  // namespace heed::recurrent
