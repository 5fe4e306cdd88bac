// MesaNet: the checks of a call, and its tokens outside sequences.
#include "heed/ops/gated/mesa/mesa.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/gated/mesa/mesa_internal.h"

namespace heed::mesa {
namespace {

using mechanism::Axes;
using mechanism::CheckTensor;
using mechanism::Fail;

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// Throws for an element that is not above the bound, or at it with `or_equal`.
void CheckAbove(const char* op, const char* name, const ConstTensorView& t, double bound, bool or_equal) {
  std::vector<int64_t> index(static_cast<size_t>(t.rank()));
  for (int64_t n = t.num_elements(); n-- > 0;) {
    int64_t at = 0, rest = n;
    for (int axis = t.rank(); axis-- > 0;) {
      at += rest % t.size(axis) * t.stride(axis);
      rest /= t.size(axis);
    }
    const double x = LoadAsDouble(t.dtype(), t.data(), at);
    if (x > bound || (or_equal && x == bound)) continue;
    Fail(op, name, "has the value " + mechanism::Text(x), or_equal ? "values >= 0" : "values > 0");
  }
}

// Checks the inputs and options, and adds them to `apart`. The state before the first token is called `state_name`.
// Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, bool values, mechanism::Apart& apart,
                   const char* state_name = "initial_state", bool data = true) {
  mechanism::CheckFloat(op, "q", in.q, data);
  if (in.q.rank() != 4) Fail(op, "q", "has shape " + in.q.ShapeString(), "[B, T, H, K]");
  mechanism::CheckFloat(op, "v", in.v, data);
  if (in.v.rank() != 4) Fail(op, "v", "has shape " + in.v.ShapeString(), "[B, T, H, V]");
  Call call;
  call.B = in.q.size(0);
  call.T = in.q.size(1);
  call.H = in.q.size(2);
  call.K = in.q.size(3);
  call.V = in.v.size(3);
  for (const auto& [name, view, size] : {std::tuple{"q", in.q, call.K}, {"v", in.v, call.V}}) {
    if (size < 1) Fail(op, name, "has shape " + view.ShapeString(), "at least one channel");
  }
  const DType dtype = in.q.dtype(), wide = mechanism::StateDType(dtype);
  CheckTensor(op, "q", in.q, in.q.sizes(), dtype, data);
  CheckTensor(op, "k", in.k, in.q.sizes(), dtype, data);
  CheckTensor(op, "v", in.v, {call.B, call.T, call.H, call.V}, dtype, data);
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
    mechanism::CheckContiguousRows(op, name, view);
  }
  const auto factor = [&](const char* name, const ConstTensorView& t, const Axes& shape) {
    CheckTensor(op, name, t, shape, t.present() && t.dtype() == wide ? wide : dtype, data);
  };
  factor("beta", in.beta, {call.B, call.T, call.H});
  factor("lamb", in.lamb, {call.H, call.K});
  if (values) {
    CheckAbove(op, "beta", in.beta, 0, true);
    CheckAbove(op, "lamb", in.lamb, 0, false);
  }
  if (in.log_decay.present()) {
    factor("log_decay", in.log_decay, {call.B, call.T, call.H});
    if (values) mechanism::CheckNotPositive(op, "log_decay", in.log_decay);
  }
  if (options.iterations < 1) Fail(op, "iterations", "is " + std::to_string(options.iterations), "at least 1");
  if (!std::isfinite(options.eps) || options.eps < 0) {
    Fail(op, "eps", "is " + mechanism::Text(options.eps), "a finite number >= 0");
  }
  call.iterations = options.iterations;
  call.eps = options.eps;
  call.sequences = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  if (in.initial_state.present()) {
    CheckTensor(op, state_name, in.initial_state,
                {static_cast<int64_t>(call.sequences.size()), call.H, call.K, call.K + call.V}, wide, data);
  }
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"beta", in.beta},
                                   {"lamb", in.lamb},
                                   {"log_decay", in.log_decay},
                                   {state_name, in.initial_state},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
  return call;
}

// Checks a call that is only planned.
Call Planned(const char* op, const Inputs& in, const Options& options) {
  mechanism::Apart apart;
  return CheckedInputs(op, in, options, false, apart, "initial_state", false);
}

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide,
                  bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  const DType dtype = in.q.dtype(), of_states = mechanism::StateDType(dtype);
  apart.Writes(op, "o", out.o, {call.B, call.T, call.H, call.V}, DTypeOf(out.o, dtype, wide));
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.final_state.present()) {
    apart.Writes(op, "final_state", out.final_state,
                 {static_cast<int64_t>(call.sequences.size()), call.H, call.K, call.K + call.V},
                 DTypeOf(out.final_state, of_states, wide));
  }
  if (out.solution.present()) {
    apart.Writes(op, "solution", out.solution, {call.B, call.T, call.H, call.K},
                 DTypeOf(out.solution, of_states, wide));
    mechanism::CheckContiguousRows(op, "solution", out.solution);
  }
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  const DType of_states = mechanism::StateDType(in.q.dtype());
  CheckTensor(op, "d_o", in.d_o, in.v.sizes(), in.q.dtype(), true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  apart.Reads("d_o", in.d_o);
  if (in.d_final_state.present()) {
    CheckTensor(op, "d_state", in.d_final_state,
                {static_cast<int64_t>(call.sequences.size()), call.H, call.K, call.K + call.V}, of_states, true);
    apart.Reads("d_state", in.d_final_state);
  }
  if (in.solution.present()) {
    CheckTensor(op, "solution", in.solution, in.q.sizes(), of_states, true);
    mechanism::CheckContiguousRows(op, "solution", in.solution);
    apart.Reads("solution", in.solution);
  }
  for (const auto& [name, view, of, rows] : {std::tuple{"dq", out.dq, in.q, true},
                                             {"dk", out.dk, in.k, true},
                                             {"dv", out.dv, in.v, true},
                                             {"dbeta", out.dbeta, in.beta, false},
                                             {"dlamb", out.dlamb, in.lamb, false},
                                             {"dlog_decay", out.dlog_decay, in.log_decay, false},
                                             {"dinitial_state", out.dinitial_state, in.initial_state, false}}) {
    if (!view.present()) continue;
    if (!of.present()) Fail(op, name, "is asked for", "none: there is no such input");
    apart.Writes(op, name, view, of.sizes(), DTypeOf(view, of.dtype(), wide));
    if (rows) mechanism::CheckContiguousRows(op, name, view);
  }
  return call;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckForward("mesa::Forward", in, options, out, false, ctx.checks());
  ComputeForward(ctx, call, in, out);
  for (const TensorView* t : {&out.o, &out.solution}) mechanism::ClearOthers(call.sequences, *t);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("mesa::Backward", in, options, out, false, ctx.checks());
  ComputeBackward(ctx, call, in, out);
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dbeta, &out.dlog_decay}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state, const TensorView& o) {
  constexpr char kOp[] = "mesa::Step";
  const os::ScopedFloatControl float_control;
  if (in.initial_state.present()) Fail(kOp, "initial_state", "is given", "none: a step updates its state");
  Inputs token;
  token.q = mechanism::OneToken(kOp, "q", in.q);
  token.k = mechanism::OneToken(kOp, "k", in.k);
  token.v = mechanism::OneToken(kOp, "v", in.v);
  token.beta = mechanism::OneToken(kOp, "beta", in.beta);
  token.lamb = in.lamb;
  if (in.log_decay.present()) token.log_decay = mechanism::OneToken(kOp, "log_decay", in.log_decay);
  token.initial_state = state;
  if (!state.present()) Fail(kOp, "state", "is absent", "the state of the tokens so far");
  Options of_token;
  of_token.iterations = options.iterations;
  of_token.eps = options.eps;
  mechanism::Apart apart;
  const Call call = CheckedInputs(kOp, token, of_token, ctx.checks(), apart, "state");
  mechanism::Apart outputs;
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"beta", in.beta},
                                   {"lamb", in.lamb},
                                   {"log_decay", in.log_decay}}) {
    outputs.Reads(name, view);
  }
  outputs.Writes(kOp, "state", state);
  outputs.Writes(kOp, "o", o, {call.B, call.H, call.V}, in.q.dtype());
  mechanism::CheckContiguousRows(kOp, "o", o);
  const TensorView with_token(o.data(), o.dtype(), {o.size(0), 1, o.size(1), o.size(2)},
                              {o.stride(0), 0, o.stride(1), o.stride(2)});
  ComputeForward(ctx, call, token, {with_token, state, {}});
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardMemory(ctx, Planned("mesa::Workspace", in, options), in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BackwardMemory(ctx, Planned("mesa::BackwardWorkspace", in, options), in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Planned("mesa::Explain", in, options);
  const Flops each = FlopsOf(call.K, call.V, call.iterations, kChunkTokens);
  Explanation e;
  e.kernel = "mesa_chunks";
  e.target = TargetName(ctx.allowed_targets());
  e.why = "chunks of 16 tokens, which multiply by the state before them and by each other in every step of the solver";
  e.flops = (each.solution + each.around) * static_cast<double>(call.H * mechanism::NumTokens(call.sequences));
  e.bytes = mechanism::Bytes(in.v);  // of o
  for (const ConstTensorView* t : {&in.q, &in.k, &in.v, &in.beta, &in.lamb, &in.log_decay, &in.initial_state}) {
    e.bytes += mechanism::Bytes(*t);
  }
  e.workspace_bytes = ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
  return e;
}

}  // namespace heed::mesa
