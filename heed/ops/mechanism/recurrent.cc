// Calls of recurrent mechanisms: checked, mapped onto the recurrence engine, run.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/recurrence/kernels.h"
#include "heed/ops/mechanism/check_internal.h"
#include "heed/ops/mechanism/recurrent_internal.h"

namespace heed::recurrent {
namespace {

using mechanism::Fail;
using recurrence::Gate;
using recurrence::Problem;

void CheckShape(const char* op, const char* name, const ConstTensorView& t,
                const Axes& shape) {
  const std::span<const int64_t> sizes = shape;
  if (!std::equal(t.sizes().begin(), t.sizes().end(), sizes.begin(), sizes.end())) {
    Fail(op, name, "has shape " + t.ShapeString(), ShapeString(sizes));
  }
}

void CheckDType(const char* op, const char* name, const ConstTensorView& t, DType dtype) {
  if (t.dtype() != dtype) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), Name(dtype));
  }
}

// Everything about a call that has been checked.
struct Call {
  Problem problem;
  std::vector<TokenRange> ranges;
  AxisSizes sizes;
  Axes o_shape, S_shape, z_shape, m_shape;
  bool has_z, has_m;  // of its states
  bool reverse, value_first;
  DType o_dtype, dv_dtype;  // d_o has that of o

  // As if new, but for the memory of lists.
  void Reset() {
    std::vector<recurrence::Sequence> sequences = std::move(problem.sequences);
    sequences.clear();
    problem = {};
    problem.sequences = std::move(sequences);
    ranges.clear();
    decays_f64.clear();
    decays_f32.clear();
  }
  std::vector<double> decays_f64;  // constants of heads, whatever their dtype was
  std::vector<float> decays_f32;
};

recurrence::Rows RowsOf(const Call& call, const ConstTensorView& t) {
  const int64_t step = call.reverse ? -1 : 1;
  if (!t.present()) return {};
  if (t.rank() <= 2) return {t.data(), t.dtype(), 0, 0, t.stride(0)};  // over heads alone
  return {t.data(), t.dtype(), t.stride(0), step * t.stride(1), t.stride(2)};
}

// [B, T, n, H, ...].
recurrence::Rows WritesOf(const Call& call, const ConstTensorView& t) {
  recurrence::Rows rows = RowsOf(call, t);
  if (!t.present()) return rows;
  rows.write_stride = t.stride(2);
  rows.head_stride = t.stride(3);
  return rows;
}

// A matrix, each row contiguous.
recurrence::Rows MatrixOf(const ConstTensorView& t) {
  return {t.data(), t.dtype(), 0, t.stride(0), 0};
}

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
  return {t.data(), t.stride(0), t.stride(1), t.rank() > 2 ? t.stride(2) : 0,
          t.rank() == 4 ? t.stride(3) : 0};
}

void CheckDecays(const char* op, const char* name, const ConstTensorView& t) {
  const int64_t count = t.num_elements();
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, at = 0;
    for (int axis = t.rank() - 1; axis >= 0; --axis) {
      at += rest % t.size(axis) * t.stride(axis);
      rest /= t.size(axis);
    }
    const double value = LoadAsDouble(t.dtype(), t.data(), at);
    if (!(value <= 0)) {
      Fail(op, name, "has an element " + mechanism::Text(value), "<= 0 everywhere");
    }
  }
}

// What errors call the parts of a state, in memory of their own: a step allocates nothing.
struct StateNames {
  char S[32], z[32], m[32];
  StateNames(const Definition& definition, const char* state) {
    char* const names[] = {S, z, m};
    for (size_t i = 0; i < 3; ++i) {
      std::snprintf(names[i], sizeof(S), "%s%s", state, definition.state_names[i]);
    }
  }
};

void CheckCall(const char* op, const Context* checks, const Definition& definition,
               const Inputs& in, const Options& options, bool data, Call& call) {
  call.Reset();
  Problem& p = call.problem;
  const char *query_name = definition.query_name, *value_name = definition.value_name;
  if (!in.q.present()) Fail(op, query_name, "is absent", "a tensor");
  const bool several = definition.several_writes, channels = definition.channels;
  if (in.q.rank() != (channels ? 3 : 4)) {
    Fail(op, query_name, "has shape " + in.q.ShapeString(),
         channels ? "rank 3: [B, T, C]" : "rank 4: [B, T, H, K]");
  }
  if (!IsFloat(in.q.dtype())) {
    Fail(op, query_name, std::string("has dtype ") + Name(in.q.dtype()),
         "f64, f32, bf16 or f16");
  }
  if (!in.v.present()) Fail(op, value_name, "is absent", "a tensor");
  if (in.v.rank() != (several ? 5 : channels ? 3 : 4)) {
    Fail(op, value_name, "has shape " + in.v.ShapeString(),
         several    ? "rank 5: [B, T, n, HV, V]"
         : channels ? "rank 3: [B, T, C]"
                    : "rank 4: [B, T, HV, V]");
  }
  p.dtype = in.q.dtype();
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
    Fail(op, "projection", "has shape " + W.ShapeString(),
         "[M, K = " + std::to_string(K) + "], M >= 1");
  }
  call.sizes = {B, T, H, HV, K, V, random && W.present() ? W.size(0) : 0, p.writes};
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
    CheckInput(op, tensor.name, t, ShapeOf(tensor.axes, call.sizes),
               own ? t.dtype() : p.dtype, data);
    if (tensor.contiguous_rows()) mechanism::CheckContiguousRows(op, tensor.name, t);
    if (tensor.values == Tensor::kDecays && given && checks != nullptr &&
        checks->checks() && t.data() != nullptr) {
      CheckDecays(op, tensor.name, t);
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
    p.feature_eps = definition.feature_eps;
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
  p.scale = options.scale.value_or(
      definition.root_scale ? 1 / std::sqrt(static_cast<double>(K)) : 1);
  if (!std::isfinite(p.scale)) {
    Fail(op, "scale", "is " + mechanism::Text(p.scale), "a finite number");
  }

  const bool by_key = definition.decay == DecayShape::kKey ||
                      definition.decay == DecayShape::kHeadKey;
  p.gate = definition.decay == DecayShape::kNone || (several && !in.log_decay.present())
               ? Gate::kNone
           : by_key ? Gate::kKey
                    : Gate::kScalar;
  p.constant_decay = IsConstant(definition.decay);
  p.has_value_decay = in.log_decay_v.present();
  p.has_bonus = definition.bonus;

  Ranges(op, in.q, options, data, call.ranges);
  const auto sequences = static_cast<int64_t>(call.ranges.size());
  for (int64_t i = 0; i < sequences; ++i) {
    const TokenRange& range = call.ranges[static_cast<size_t>(i)];
    // Backwards in time, strides are negative and tokens count from the end.
    p.sequences.push_back({range.batch, i, options.reverse ? 1 - range.end : range.begin,
                           range.end - range.begin});
  }
  const int64_t F = p.features();
  call.S_shape = {sequences, HV, F, V};
  if (call.value_first) std::swap(call.S_shape[2], call.S_shape[3]);
  call.z_shape = {sequences, HV, F};
  call.m_shape = {sequences, HV};
  if (channels) call.S_shape = call.z_shape = call.m_shape;
  call.has_z = p.causal && p.normalize;
  call.has_m = HasMaximum(definition);
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
  const auto state = [&](const char* name, const ConstTensorView& t, bool exists,
                         const Axes& shape) {
    if (!t.present()) return;
    if (!exists) Fail(op, name, "is given", "none: this call has no such state");
    CheckInput(op, name, t, shape, StateDType(p.dtype), data);
  };
  const StateNames names(definition, "initial_state");
  state(names.S, in.initial.S, p.causal, call.S_shape);
  state(names.z, in.initial.z, call.has_z, call.z_shape);
  state(names.m, in.initial.m, call.has_m, call.m_shape);
  if (p.running_max() && in.initial.S.present() && !in.initial.m.present()) {
    Fail(op, names.m, "is absent", "a tensor, which the others are relative to");
  }
  p.initial = StatesOf(call, in.initial.S);
  p.initial_z = StatesOf(call, in.initial.z);
  p.initial_m = StatesOf(call, in.initial.m);
}

Call CheckedCall(const char* op, const Context* checks, const Definition& definition,
                 const Inputs& in, const Options& options, bool data) {
  Call call;
  CheckCall(op, checks, definition, in, options, data, call);
  return call;
}

// Checks outputs: shape, dtype, and memory apart from all inputs and each other.
class Outlets {
 public:
  Outlets(const char* op, const Definition& definition, const Inputs& in,
          const Options& options)
      : op_(op) {
    for (const Tensor& tensor : Tensors(definition)) Reads(tensor.name, in.*tensor.input);
    const StateNames names(definition, "initial_state");
    Reads(names.S, in.initial.S);
    Reads(names.z, in.initial.z);
    Reads(names.m, in.initial.m);
    Reads("lengths", options.lengths);
    Reads("starts", options.starts);
    Reads("cu_seqlens", options.cu_seqlens);
  }
  void Reads(const char* name, const ConstTensorView& t) { tensors_.Reads(name, t); }
  void Check(const char* name, const TensorView& t, const Axes& shape, DType dtype,
             bool contiguous_rows) {
    CheckInput(op_, name, t, shape, dtype, true);
    if (contiguous_rows) mechanism::CheckContiguousRows(op_, name, t);
    tensors_.Writes(op_, name, t);
  }

 private:
  const char* op_;
  mechanism::Apart tensors_;
};

void Prepare(const Definition& definition) {
  if (definition.surroundings != nullptr && definition.surroundings->prepare) {
    definition.surroundings->prepare();
  }
}

double Bytes(const ConstTensorView& t) {
  return t.present() ? static_cast<double>(t.num_elements()) *
                           static_cast<double>(SizeOf(t.dtype()))
                     : 0;
}

}  // namespace

void CheckInput(const char* op, const char* name, const ConstTensorView& t,
                const Axes& shape, DType dtype, bool data) {
  if (!t.present()) Fail(op, name, "is absent", "a tensor");
  CheckDType(op, name, t, dtype);
  CheckShape(op, name, t, shape);
  if (data || t.data() != nullptr) mechanism::CheckReadable(op, name, t);
}

DType StateDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

void Forward(const char* op, Context& ctx, const Definition& definition, const Inputs& in,
             const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  Call call = CheckedCall(op, &ctx, definition, in, options, true);
  Problem& p = call.problem;
  Outlets outlets(op, definition, in, options);
  outlets.Check("o", out.o, call.o_shape, call.o_dtype, true);
  const auto state = [&](const char* name, const TensorView& t, bool exists,
                         const Axes& shape) {
    if (!t.present()) return;
    if (!exists) Fail(op, name, "is asked for", "none: this call has no such state");
    outlets.Check(name, t, shape, StateDType(p.dtype), false);
  };
  const StateNames names(definition, "final_state");
  state(names.S, out.final.S, p.causal, call.S_shape);
  state(names.z, out.final.z, call.has_z, call.z_shape);
  state(names.m, out.final.m, call.has_m, call.m_shape);
  p.o = RowsOf(call, out.o);
  p.final = StatesOf(call, out.final.S);
  p.final_z = StatesOf(call, out.final.z);
  p.final_m = StatesOf(call, out.final.m);
  const auto& kernel = recurrence::Choose(op, ctx, p);
  Prepare(definition);
  kernel.forward(ctx, p);
  ClearOthers(call.ranges, out.o);
}

void Backward(const char* op, Context& ctx, const Definition& definition,
              const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  Call call = CheckedCall(op, &ctx, definition, in, options, true);
  Problem& p = call.problem;
  recurrence::Gradients g;
  CheckInput(op, "d_o", in.d_o, call.o_shape, call.o_dtype, true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  g.d_o = RowsOf(call, in.d_o);
  Outlets outlets(op, definition, in, options);
  outlets.Reads("d_o", in.d_o);
  const auto arriving = [&](const char* name, const ConstTensorView& t, bool exists,
                            const Axes& shape) {
    if (!t.present()) return recurrence::States();
    if (!exists) Fail(op, name, "is given", "none: this call has no such state");
    CheckInput(op, name, t, shape, StateDType(p.dtype), true);
    outlets.Reads(name, t);
    return StatesOf(call, t);
  };
  const StateNames names(definition, "d_state"), initial_names(definition, "dinitial_state");
  g.d_final = arriving(names.S, in.d_final.S, p.causal, call.S_shape);
  g.d_final_z = arriving(names.z, in.d_final.z, call.has_z, call.z_shape);

  if (in.d_final.m.present()) Fail(op, names.m, "is given", "none: it is a constant");
  if (out.dinitial.m.present()) {
    Fail(op, initial_names.m, "is asked for", "none: it is a constant");
  }
  for (const Tensor& tensor : Tensors(definition)) {
    const TensorView& t = out.*tensor.gradient;
    if (!t.present()) continue;
    const std::string name = std::string("d") + tensor.name;
    const ConstTensorView& input = in.*tensor.input;
    if (!input.present()) Fail(op, name.c_str(), "is asked for", "none: there is no such input");
    outlets.Check(name.c_str(), t, ShapeOf(tensor.axes, call.sizes),
                  tensor.input == &Inputs::v ? call.dv_dtype : input.dtype(),
                  tensor.contiguous_rows() || t.rank() == 2);
  }
  for (const Tensor& tensor : Tensors::NotOf(definition)) {
    if (!(out.*tensor.gradient).present()) continue;
    Fail(op, (std::string("d") + tensor.name).c_str(), "is asked for",
         "none: there is no such input");
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
  const auto initial = [&](const char* name, const TensorView& t, bool exists,
                           const Axes& shape) {
    if (!t.present()) return recurrence::States();
    if (!exists) Fail(op, name, "is asked for", "none: this call has no such state");
    outlets.Check(name, t, shape, StateDType(p.dtype), false);
    return StatesOf(call, t);
  };
  g.d_initial = initial(initial_names.S, out.dinitial.S, p.causal, call.S_shape);
  g.d_initial_z = initial(initial_names.z, out.dinitial.z, call.has_z, call.z_shape);
  const auto& kernel = recurrence::Choose(op, ctx, p);
  Prepare(definition);
  kernel.backward(ctx, p, g);
  for (const Tensor& tensor : Tensors(definition)) {
    if (tensor.over_tokens()) ClearOthers(call.ranges, out.*tensor.gradient);
  }
}

void Step(const char* op, Context& ctx, const Definition& definition,
          const StepInputs& in, const Options& options, const State& state,
          const TensorView& o) {
  const os::ScopedFloatControl float_control;
  Inputs whole;
  for (const Tensor& tensor : Tensors(definition)) {
    const ConstTensorView& t = in.*tensor.step;
    whole.*tensor.input = tensor.over_tokens() ? OneToken(op, tensor.name, t) : t;
  }
  Options scale;  // all that a token can be asked for
  scale.scale = options.scale;
  thread_local Call call;  // whose memory the next step finds again
  CheckCall(op, &ctx, definition, whole, scale, true, call);
  Problem& p = call.problem;
  Outlets outlets(op, definition, whole, scale);
  const auto in_place = [&](const char* name, const TensorView& t, const Axes& shape) {
    if (!t.present()) Fail(op, name, "is absent", "a tensor");
    outlets.Check(name, t, shape, StateDType(p.dtype), true);
    return StatesOf(call, t);
  };
  const StateNames names(definition, "state");
  p.final = in_place(names.S, state.S, call.S_shape);
  if (p.normalize) p.final_z = in_place(names.z, state.z, call.z_shape);
  if (call.has_m) p.initial_m = p.final_m = in_place(names.m, state.m, call.m_shape);
  if (p.channels) {
    p.initial = p.final;
    p.initial_z = p.final_z;
  }
  const ConstTensorView out = OneToken(op, "o", o);
  if (!out.present()) Fail(op, "o", "is absent", "a tensor");
  const TensorView writable(const_cast<void*>(out.data()), out.dtype(), out.sizes(),
                            out.strides(), out.device());
  outlets.Check("o", writable, call.o_shape, p.dtype, true);
  p.o = RowsOf(call, out);
  const auto& kernel = recurrence::Choose(op, ctx, p);
  Prepare(definition);
  kernel.step(ctx, p);
}

int64_t Workspace(const char* op, const Context& ctx, const Definition& definition,
                  const Inputs& in, const Options& options) {
  const Call call = CheckedCall(op, nullptr, definition, in, options, false);
  return recurrence::Choose(op, ctx, call.problem).workspace(ctx, call.problem) *
         ctx.num_threads();
}

int64_t BackwardWorkspace(const char* op, const Context& ctx,
                          const Definition& definition, const Inputs& in,
                          const Options& options) {
  const Call call = CheckedCall(op, nullptr, definition, in, options, false);
  const auto bytes =
      recurrence::Choose(op, ctx, call.problem).backward_workspace(ctx, call.problem);
  return bytes.per_thread * ctx.num_threads() + bytes.shared;
}

Explanation Explain(const char* op, const Context& ctx, const Definition& definition,
                    const Inputs& in, const Options& options) {
  const Call call = CheckedCall(op, nullptr, definition, in, options, false);
  const Problem& p = call.problem;
  const recurrence::Kernel& kernel = recurrence::Choose(op, ctx, p);
  double tokens = 0;
  for (const TokenRange& range : call.ranges) {
    tokens += static_cast<double>(range.end - range.begin);
  }
  Explanation e;
  e.kernel = kernel.name;
  e.target = TargetName(ctx.allowed_targets());
  e.why = kernel.why;
  const double products = p.channels                                   ? kFlopsOfChannels
                          : p.delta == recurrence::Delta::kNone        ? 4
                          : p.delta == recurrence::Delta::kAfterDecay ? 6
                                                                      : 8;
  e.flops = products * tokens * static_cast<double>(p.writes) * static_cast<double>(p.value_heads) *
            static_cast<double>(p.features()) * static_cast<double>(p.value_size);
  e.flops += 4 * tokens * static_cast<double>(p.value_heads) *
             static_cast<double>(p.projection_rows) * static_cast<double>(p.key_size);
  e.bytes = Bytes(in.v) + Bytes(in.initial.S) + Bytes(in.initial.z);  // o and states
  for (const Tensor& tensor : Tensors(definition)) e.bytes += Bytes(in.*tensor.input);
  e.workspace_bytes = kernel.workspace(ctx, p) * ctx.num_threads();
  return e;
}

}  // namespace heed::recurrent
