// TTT-Linear: the checks of a call, and its tokens outside sequences.
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using mechanism::Axes;
using mechanism::CheckTensor;
using mechanism::Fail;

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

Axes StateShape(const Call& call) {
  return {static_cast<int64_t>(call.sequences.size()), call.H, 2, call.K + 1, call.K};
}

// The place in its mini-batch of the first token of each sequence.
std::vector<int64_t> OffsetsOf(const char* op, const Inputs& in, const Options& options, size_t sequences) {
  std::vector<int64_t> offsets(sequences);
  const ConstTensorView& t = options.positions;
  if (!t.present()) return offsets;
  if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) {
    Fail(op, "positions", std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  }
  CheckTensor(op, "positions", t, {static_cast<int64_t>(sequences)}, t.dtype(), true);
  for (size_t n = 0; n < sequences; ++n) {
    const int64_t position = LoadAsInt64(t.dtype(), t.data(), static_cast<int64_t>(n) * t.stride(0));
    const std::string name = "positions[" + std::to_string(n) + "]";
    if (position < 0) Fail(op, name.c_str(), "is " + std::to_string(position), "0 or more");
    if (position > 0 && !in.initial_state.present()) {
      Fail(op, name.c_str(), "is " + std::to_string(position), "0 without initial_state");
    }
    offsets[n] = position % options.mini_batch;
  }
  return offsets;
}

// Checks the inputs and options, and adds them to `apart`. The state before the first token is called `state_name`.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, mechanism::Apart& apart,
                   const char* state_name = "initial_state") {
  mechanism::CheckFloat(op, "q", in.q);
  if (in.q.rank() != 4) Fail(op, "q", "has shape " + in.q.ShapeString(), "[B, T, H, K]");
  Call call;
  call.B = in.q.size(0);
  call.T = in.q.size(1);
  call.H = in.q.size(2);
  call.K = in.q.size(3);
  if (call.K < 1) Fail(op, "q", "has shape " + in.q.ShapeString(), "at least one channel");
  const DType dtype = in.q.dtype(), wide = mechanism::StateDType(dtype);
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
    CheckTensor(op, name, view, in.q.sizes(), dtype, true);  // the model's error is that of k + LN(z) to v: V = K
    mechanism::CheckContiguousRows(op, name, view);
  }
  const auto factor = [&](const char* name, const ConstTensorView& t, const Axes& shape) {
    CheckTensor(op, name, t, shape, t.present() && t.dtype() == wide ? wide : dtype, true);
  };
  factor("weight", in.weight, {call.H, call.K});
  factor("bias", in.bias, {call.H, call.K});
  factor("eta", in.eta, {call.B, call.T, call.H});
  if (in.lr.present()) factor("lr", in.lr, {call.B, call.T, call.H});
  if (options.mini_batch < 1) Fail(op, "mini_batch", "is " + std::to_string(options.mini_batch), "at least 1");
  if (!std::isfinite(options.eps) || options.eps < 0) {
    Fail(op, "eps", "is " + mechanism::Text(options.eps), "a finite number >= 0");
  }
  if (!std::isfinite(options.scale)) Fail(op, "scale", "is " + mechanism::Text(options.scale), "a finite number");
  if (options.residual != Residual::kQuery && options.residual != Residual::kOutput) {
    Fail(op, "residual", "is " + std::to_string(static_cast<int>(options.residual)), "kQuery or kOutput");
  }
  call.mini_batch = options.mini_batch;
  call.eps = options.eps;
  call.scale = options.scale;
  call.query_residual = options.residual == Residual::kQuery;
  call.sequences = mechanism::RangesOf(op, "q", in.q, options);
  if (in.initial_state.present()) CheckTensor(op, state_name, in.initial_state, StateShape(call), wide, true);
  call.offsets = OffsetsOf(op, in, options, call.sequences.size());
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"weight", in.weight},
                                   {"bias", in.bias},
                                   {"eta", in.eta},
                                   {"lr", in.lr},
                                   {state_name, in.initial_state},
                                   {"positions", options.positions},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
  return call;
}

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, apart);
  const DType dtype = in.q.dtype();
  apart.Writes(op, "o", out.o, in.q.sizes(), DTypeOf(out.o, dtype, wide));
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.final_state.present()) {
    apart.Writes(op, "final_state", out.final_state, StateShape(call),
                 DTypeOf(out.final_state, mechanism::StateDType(dtype), wide));
  }
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, apart);
  CheckTensor(op, "d_o", in.d_o, in.q.sizes(), in.q.dtype(), true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  apart.Reads("d_o", in.d_o);
  if (in.d_final_state.present()) {
    CheckTensor(op, "d_state", in.d_final_state, StateShape(call), mechanism::StateDType(in.q.dtype()), true);
    apart.Reads("d_state", in.d_final_state);
  }
  for (const auto& [name, view, of, rows] : {std::tuple{"dq", out.dq, in.q, true},
                                             {"dk", out.dk, in.k, true},
                                             {"dv", out.dv, in.v, true},
                                             {"dweight", out.dweight, in.weight, false},
                                             {"dbias", out.dbias, in.bias, false},
                                             {"deta", out.deta, in.eta, false},
                                             {"dlr", out.dlr, in.lr, false},
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
  const Call call = CheckForward("ttt_linear::Forward", in, options, out, false);
  ComputeForward(ctx, call, in, out);
  mechanism::ClearOthers(call.sequences, out.o);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("ttt_linear::Backward", in, options, out, false);
  ComputeBackward(ctx, call, in, out);
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.deta, &out.dlr}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state, const TensorView& o) {
  constexpr char kOp[] = "ttt_linear::Step";
  const os::ScopedFloatControl float_control;
  if (in.initial_state.present()) Fail(kOp, "initial_state", "is given", "none: a step updates its state");
  Inputs token;
  token.q = mechanism::OneToken(kOp, "q", in.q);
  token.k = mechanism::OneToken(kOp, "k", in.k);
  token.v = mechanism::OneToken(kOp, "v", in.v);
  token.weight = in.weight;
  token.bias = in.bias;
  token.eta = mechanism::OneToken(kOp, "eta", in.eta);
  if (in.lr.present()) token.lr = mechanism::OneToken(kOp, "lr", in.lr);
  if (!state.present()) Fail(kOp, "state", "is absent", "the state of the tokens so far");
  token.initial_state = state;
  Options of_token;
  of_token.mini_batch = options.mini_batch;
  of_token.eps = options.eps;
  of_token.scale = options.scale;
  of_token.residual = options.residual;
  of_token.positions = options.positions;
  mechanism::Apart apart;
  const Call call = CheckedInputs(kOp, token, of_token, apart, "state");
  mechanism::Apart outputs;
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"weight", in.weight},
                                   {"bias", in.bias},
                                   {"eta", in.eta},
                                   {"lr", in.lr},
                                   {"positions", options.positions}}) {
    outputs.Reads(name, view);
  }
  outputs.Writes(kOp, "state", state);
  outputs.Writes(kOp, "o", o, {call.B, call.H, call.K}, in.q.dtype());
  mechanism::CheckContiguousRows(kOp, "o", o);
  const TensorView with_token(o.data(), o.dtype(), {o.size(0), 1, o.size(1), o.size(2)},
                              {o.stride(0), 0, o.stride(1), o.stride(2)});
  ComputeForward(ctx, call, token, {with_token, state});
}

}  // namespace heed::ttt_linear
