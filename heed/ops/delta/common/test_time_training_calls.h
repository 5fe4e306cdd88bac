// Calls of memories that are trained while they read: their checks, and what surrounds their passes. A memory M has
//
//   M::Inputs, BackwardInputs, Options, Outputs, Gradients, Call   the public structs, and a checked call
//   M::kTensors                                                   its inputs besides the state
//   M::StateShape(call)
//   M::CheckOptions(op, options, call)                            options that it alone has
#ifndef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_CALLS_H_
#define HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_CALLS_H_

#include <string>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/core/tensor.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/structs.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/delta/common/test_time_training_internal.h"

namespace heed::test_time_training {

// The axes of an input: rows of tokens [B, T, H, K], numbers of tokens [B, T, H], or rows of heads [H, K].
enum class InputAxes { kTokenRows, kTokens, kHeadRows };

// An input and its gradient.
template <class Inputs, class Gradients>
struct Tensor {
  const char* name;
  ConstTensorView Inputs::* input;
  const char* gradient_name;
  TensorView Gradients::* gradient;
  InputAxes axes;
  bool optional = false;
};

// Checks the inputs and options, and adds them to `apart`. The state before the first token is called `state_name`.
// Without `data`, pointers may be null.
template <class M>
typename M::Call CheckedInputs(const char* op, const typename M::Inputs& in, const typename M::Options& options,
                               mechanism::Apart& apart, const char* state_name = "initial_state", bool data = true) {
  typename M::Call call;
  CheckRows(op, in.q, in.k, in.v, data, call);
  const DType dtype = in.q.dtype();
  for (const auto& tensor : M::kTensors) {
    const ConstTensorView& view = in.*tensor.input;
    if (tensor.axes == InputAxes::kTokenRows || (tensor.optional && !view.present())) continue;
    const bool tokens = tensor.axes == InputAxes::kTokens;
    CheckFactor(op, tensor.name, view,
                tokens ? mechanism::Axes{call.B, call.T, call.H} : mechanism::Axes{call.H, call.K}, dtype, data);
  }
  CheckOptions(op, options.mini_batch, options.eps, options.scale, call);
  M::CheckOptions(op, options, call);
  call.sequences = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  if (in.initial_state.present()) {
    mechanism::CheckTensor(op, state_name, in.initial_state, M::StateShape(call), mechanism::StateDType(dtype), data);
  }
  CheckPositions(op, options.positions, in.initial_state.present(), data, call);
  for (const auto& tensor : M::kTensors) apart.Reads(tensor.name, in.*tensor.input);
  apart.Reads(state_name, in.initial_state);
  apart.Reads("positions", options.positions);
  apart.Reads("lengths", options.lengths);
  apart.Reads("starts", options.starts);
  apart.Reads("cu_seqlens", options.cu_seqlens);
  return call;
}

// Checks a call that is only planned.
template <class M>
typename M::Call Planned(const char* op, const typename M::Inputs& in, const typename M::Options& options) {
  mechanism::Apart apart;
  return CheckedInputs<M>(op, in, options, apart, "initial_state", false);
}

// Check all arguments; with `wide`, outputs may be f64.
template <class M>
typename M::Call CheckedForward(const char* op, const typename M::Inputs& in, const typename M::Options& options,
                                const typename M::Outputs& out, bool wide) {
  mechanism::Apart apart;
  typename M::Call call = CheckedInputs<M>(op, in, options, apart);
  const DType dtype = in.q.dtype();
  apart.Writes(op, "o", out.o, in.q.sizes(), DTypeOf(out.o, dtype, wide));
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.final_state.present()) {
    apart.Writes(op, "final_state", out.final_state, M::StateShape(call),
                 DTypeOf(out.final_state, mechanism::StateDType(dtype), wide));
  }
  return call;
}
template <class M>
typename M::Call CheckedBackward(const char* op, const typename M::BackwardInputs& in,
                                 const typename M::Options& options, const typename M::Gradients& out, bool wide) {
  mechanism::Apart apart;
  typename M::Call call = CheckedInputs<M>(op, in, options, apart);
  mechanism::CheckTensor(op, "d_o", in.d_o, in.q.sizes(), in.q.dtype(), true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  apart.Reads("d_o", in.d_o);
  if (in.d_final_state.present()) {
    mechanism::CheckTensor(op, "d_state", in.d_final_state, M::StateShape(call), mechanism::StateDType(in.q.dtype()),
                           true);
    apart.Reads("d_state", in.d_final_state);
  }
  const auto check = [&](const char* name, const TensorView& view, const ConstTensorView& of, bool rows) {
    if (!view.present()) return;
    if (!of.present()) mechanism::Fail(op, name, "is asked for", "none: there is no such input");
    apart.Writes(op, name, view, of.sizes(), DTypeOf(view, of.dtype(), wide));
    if (rows) mechanism::CheckContiguousRows(op, name, view);
  };
  for (const auto& tensor : M::kTensors) {
    check(tensor.gradient_name, out.*tensor.gradient, in.*tensor.input, tensor.axes == InputAxes::kTokenRows);
  }
  check("dinitial_state", out.dinitial_state, in.initial_state, false);
  return call;
}

template <class M>
void CallForward(const char* op, Context& ctx, const typename M::Inputs& in, const typename M::Options& options,
                 const typename M::Outputs& out) {
  const os::ScopedFloatControl float_control;
  const auto call = CheckedForward<M>(op, in, options, out, false);
  ComputeForward(ctx, call, in, out);
  mechanism::ClearOthers(call.sequences, out.o);
}

template <class M>
void CallBackward(const char* op, Context& ctx, const typename M::BackwardInputs& in,
                  const typename M::Options& options, const typename M::Gradients& out) {
  const os::ScopedFloatControl float_control;
  const auto call = CheckedBackward<M>(op, in, options, out, false);
  ComputeBackward(ctx, call, in, out);
  for (const auto& tensor : M::kTensors) {
    if (tensor.axes != InputAxes::kHeadRows) mechanism::ClearOthers(call.sequences, out.*tensor.gradient);
  }
}

// A step is a forward pass over one token whose initial and final state are one tensor.
template <class M>
void CallStep(const char* op, Context& ctx, const typename M::Inputs& in, const typename M::Options& options,
              const TensorView& state, const TensorView& o) {
  const os::ScopedFloatControl float_control;
  if (in.initial_state.present()) {
    mechanism::Fail(op, "initial_state", "is given", "none: a step updates its state");
  }
  typename M::Inputs token = in;
  for (const auto& tensor : M::kTensors) {
    const ConstTensorView& view = in.*tensor.input;
    if (tensor.axes == InputAxes::kHeadRows || (tensor.optional && !view.present())) continue;
    token.*tensor.input = mechanism::OneToken(op, tensor.name, view);
  }
  if (!state.present()) mechanism::Fail(op, "state", "is absent", "the state of the tokens so far");
  token.initial_state = state;
  typename M::Options of_token = options;
  of_token.lengths = of_token.starts = of_token.cu_seqlens = {};
  mechanism::Apart apart;
  const auto call = CheckedInputs<M>(op, token, of_token, apart, "state");
  mechanism::Apart outputs;
  for (const auto& tensor : M::kTensors) outputs.Reads(tensor.name, in.*tensor.input);
  outputs.Reads("positions", options.positions);
  outputs.Writes(op, "state", state);
  outputs.Writes(op, "o", o, {call.B, call.H, call.K}, in.q.dtype());
  mechanism::CheckContiguousRows(op, "o", o);
  const TensorView with_token(o.data(), o.dtype(), {o.size(0), 1, o.size(1), o.size(2)},
                              {o.stride(0), 0, o.stride(1), o.stride(2)});
  ComputeForward(ctx, call, token, {with_token, state});
}

// The target and the bytes of a forward pass.
template <class M>
mechanism::Explanation Explained(const Context& ctx, const typename M::Inputs& in) {
  mechanism::Explanation e;
  e.target = TargetName(ctx.allowed_targets());
  e.bytes = mechanism::Bytes(in.v) + mechanism::Bytes(in.initial_state);  // o has the size of v
  for (const auto& tensor : M::kTensors) e.bytes += mechanism::Bytes(in.*tensor.input);
  return e;
}

}  // namespace heed::test_time_training

#endif  // HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_CALLS_H_
