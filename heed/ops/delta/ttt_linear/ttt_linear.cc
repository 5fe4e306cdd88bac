// TTT-Linear: the checks of a call, and its tokens outside sequences.
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/common/test_time_training_internal.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"

namespace heed::ttt_linear {
namespace {

using mechanism::Axes;
using mechanism::CheckTensor;
using mechanism::Fail;
using test_time_training::CheckFactor;
using test_time_training::DTypeOf;

Axes StateShape(const Call& call) {
  return {static_cast<int64_t>(call.sequences.size()), call.H, 2, call.K + 1, call.K};
}

// Checks the inputs and options, and adds them to `apart`. The state before the first token is called `state_name`.
// Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, mechanism::Apart& apart,
                   const char* state_name = "initial_state", bool data = true) {
  Call call;
  test_time_training::CheckRows(op, in.q, in.k, in.v, data, call);
  const DType dtype = in.q.dtype();
  CheckFactor(op, "weight", in.weight, {call.H, call.K}, dtype, data);
  CheckFactor(op, "bias", in.bias, {call.H, call.K}, dtype, data);
  CheckFactor(op, "eta", in.eta, {call.B, call.T, call.H}, dtype, data);
  if (in.lr.present()) CheckFactor(op, "lr", in.lr, {call.B, call.T, call.H}, dtype, data);
  test_time_training::CheckOptions(op, options.mini_batch, options.eps, options.scale, call);
  if (options.residual != Residual::kQuery && options.residual != Residual::kOutput) {
    Fail(op, "residual", "is " + std::to_string(static_cast<int>(options.residual)), "kQuery or kOutput");
  }
  call.query_residual = options.residual == Residual::kQuery;
  call.sequences = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  if (in.initial_state.present()) {
    CheckTensor(op, state_name, in.initial_state, StateShape(call), mechanism::StateDType(dtype), data);
  }
  test_time_training::CheckPositions(op, options.positions, in.initial_state.present(), data, call);
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

// Checks a call that is only planned.
Call Planned(const char* op, const Inputs& in, const Options& options) {
  mechanism::Apart apart;
  return CheckedInputs(op, in, options, apart, "initial_state", false);
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

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardMemory(ctx, Planned("ttt_linear::Workspace", in, options), in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BackwardMemory(ctx, Planned("ttt_linear::BackwardWorkspace", in, options), in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Planned("ttt_linear::Explain", in, options);
  const auto K = static_cast<double>(call.K), pairs = static_cast<double>(2 * std::min<int64_t>(call.mini_batch, 16)),
             tokens = static_cast<double>(call.H * mechanism::NumTokens(call.sequences));
  Explanation e;
  e.kernel = "ttt_linear_chunks";
  e.target = TargetName(ctx.allowed_targets());
  e.why = "chunks of up to 16 tokens of a mini-batch, which multiply by its W and by each other";
  // Three products with W, and the pairs of a chunk.
  const double products = call.mini_batch > 16 ? 4 : 3;
  e.flops = tokens * (products * 2 * K * (K + 1) + pairs * (2 * K + 1));
  e.bytes = mechanism::Bytes(in.v);  // of o
  for (const ConstTensorView* t : {&in.q, &in.k, &in.v, &in.weight, &in.bias, &in.eta, &in.lr, &in.initial_state}) {
    e.bytes += mechanism::Bytes(*t);
  }
  e.workspace_bytes = ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
  return e;
}

}  // namespace heed::ttt_linear
