// The passes of a mechanism on an engine, whose Definition::Call derives from mechanism::Call and has
//
//   Check(op, checks, definition, in, options, data)   checks all arguments and fills the engine's problem
//   CheckLayout(op, checks, name, t, axes)   checks the strides of o, its gradient, or the gradient of a tensor
//   GradientDType(tensor, input)       the dtype of a gradient
//   CheckStep(op, definition)          refuses definitions that have no steps
//   Forward, Backward, Step            run a kernel
//   ForwardBytes, BackwardBytes        reserved scratch
//   Explain                            the kernel, its target and the reason for it, and flops
//   DivisionOf                         the tasks of a forward pass
#ifndef HEED_MECHANISM_PASSES_INL_H_
#define HEED_MECHANISM_PASSES_INL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "heed/core/context.h"
#include "heed/core/os.h"
#include "heed/mechanism/call_internal.h"
#include "heed/mechanism/passes_internal.h"
#include "heed/mechanism/segments_internal.h"

namespace heed::mechanism {

template <class Definition>
void Passes<Definition>::Forward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                                 const Options& options, const Results& out) {
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  typename Definition::Call call;
  call.Check(op, &ctx, definition, in, options, true);
  Apart apart = call.Readers(definition.table, in, options);
  const bool wants_states = std::ranges::any_of(out.states, &TensorView::present);
  if (out.o.present() || options.cut == nullptr || !wants_states || !call.on_cpu()) {
    apart.Writes(op, "o", out.o, call.o_shape, call.o_dtype);
    call.CheckLayout(op, nullptr, "o", out.o, call.o_axes);
  }
  call.ForStates(op, definition.table, "final_state", "is asked for", false, out.states,
                 [&](size_t i, const char* name, const TensorView& t) {
                   apart.Writes(op, name, t, call.state_shapes[i], call.state_dtype());
                 });
  call.Forward(op, ctx, definition, in, out);
  call.ClearOtherTokens(out.o, call.o_axes);
}

template <class Definition>
void Passes<Definition>::Backward(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                                  const Options& options, const Results& out) {
  const os::ScopedFloatControl float_control;
  typename Definition::Call call;
  call.Check(op, &ctx, definition, in, options, true);
  CheckTensor(op, "d_o", in.d_o, call.o_shape, call.o_dtype, true, call.device);
  call.CheckLayout(op, &ctx, "d_o", in.d_o, call.o_axes);
  Apart apart = call.Readers(definition.table, in, options);
  apart.Reads("d_o", in.d_o);
  call.ForStates(op, definition.table, "d_state", "is given", true, in.d_final,
                 [&](size_t i, const char* name, const ConstTensorView& t) {
                   CheckTensor(op, name, t, call.state_shapes[i], call.state_dtype(), true, call.device);
                   apart.Reads(name, t);
                 });
  for (size_t i = 0; i < out.gradients.size(); ++i) {
    const TensorView& t = out.gradients[i];
    if (!t.present()) continue;
    const Tensor& tensor = definition.table.tensors[i];
    const std::string name = std::string("d") + tensor.name;
    const ConstTensorView& input = in.tensors[i];
    if (!input.present()) Fail(op, name.c_str(), "is asked for", "none: there is no such input");
    if (!tensor.differentiable()) Fail(op, name.c_str(), "is asked for", "none: it has no gradient");
    apart.Writes(op, name.c_str(), t, input.sizes(), call.GradientDType(tensor, input));
    call.CheckLayout(op, nullptr, name.c_str(), t, AxesOfRank(tensor.axes, t.rank()));
  }
  call.ForStates(op, definition.table, "dinitial_state", "is asked for", true, out.states,
                 [&](size_t i, const char* name, const TensorView& t) {
                   apart.Writes(op, name, t, call.state_shapes[i], call.state_dtype());
                 });
  call.Backward(op, ctx, definition, in, out);
  for (size_t i = 0; i < out.gradients.size(); ++i) {
    const TensorView& t = out.gradients[i];
    call.ClearOtherTokens(t, AxesOfRank(definition.table.tensors[i].axes, t.rank()));
  }
}

template <class Definition>
void Passes<Definition>::Step(const char* op, Context& ctx, const Definition& definition, const Arguments& in,
                              const Options& options, const Results& out) {
  Definition::Call::CheckStep(op, definition);
  const os::ScopedFloatControl float_control;
  std::array<ConstTensorView, kMaxTensors> tensors;
  const ConstTensorView& token = At(in.tensors, 0);
  const bool has_axes = token.present() && token.rank() >= 2;
  const int64_t batch = has_axes ? token.size(0) : -1, channels = has_axes ? token.size(1) : -1;
  for (size_t i = 0; i < definition.table.tensors.size(); ++i) {
    tensors[i] =
        WithToken(op, definition.table.tensors[i], &Definition::Call::AxisName, At(in.tensors, i), batch, channels);
  }
  const Arguments whole = {.tensors = {tensors.data(), definition.table.tensors.size()}};
  thread_local typename Definition::Call call;  // its memory is reused by the next step
  call.Check(op, &ctx, definition, whole, Definition::Call::OptionsOfStep(options), true);
  Apart apart = call.Readers(definition.table, whole, Options());
  for (size_t i = 0; i < definition.table.states.size(); ++i) {
    const StateName name("state", definition.table.states[i], call.num_states() > 1);
    if (call.has_state[i] && !At(out.states, i).present()) Fail(op, name, "is absent", "a tensor");
  }
  call.ForStates(op, definition.table, "state", "is given", false, out.states,
                 [&](size_t i, const char* name, const TensorView& t) {
                   apart.Writes(op, name, t, call.state_shapes[i], call.state_dtype());
                   call.CheckStateLayout(op, name, t);
                 });
  if (!out.o.present()) Fail(op, "o", "is absent", "a tensor");
  const Tensor of_o = {.name = "o", .axes = call.o_axes};
  const ConstTensorView o = WithToken(op, of_o, &Definition::Call::AxisName, out.o, batch, channels);
  const TensorView writable(const_cast<void*>(o.data()), o.dtype(), o.sizes(), o.strides(), o.device());
  apart.Writes(op, "o", writable, call.o_shape, call.dtype);
  call.CheckLayout(op, nullptr, "o", writable, call.o_axes);
  call.Step(op, ctx, definition, whole, {writable, out.states});
}

template <class Definition>
int64_t Passes<Definition>::Workspace(const char* op, const Context& ctx, const Definition& definition,
                                      const Arguments& in, const Options& options) {
  typename Definition::Call call;
  call.Check(op, nullptr, definition, in, options, false);
  return call.ForwardBytes(op, ctx, definition, in);
}

template <class Definition>
int64_t Passes<Definition>::BackwardWorkspace(const char* op, const Context& ctx, const Definition& definition,
                                              const Arguments& in, const Options& options) {
  typename Definition::Call call;
  call.Check(op, nullptr, definition, in, options, false);
  return call.BackwardBytes(op, ctx, definition, in);
}

template <class Definition>
Explanation Passes<Definition>::Explain(const char* op, const Context& ctx, const Definition& definition,
                                        const Arguments& in, const Options& options) {
  typename Definition::Call call;
  call.Check(op, nullptr, definition, in, options, false);
  bool causal = true;
  if constexpr (requires { definition.causal; }) causal = definition.causal;
  CheckSegment(op, definition.table, options.segment, causal);
  Explanation e;
  e.bytes = static_cast<double>(SizeOf(call.o_dtype));  // of o
  for (const int64_t size : std::span<const int64_t>(call.o_shape)) e.bytes *= static_cast<double>(size);
  for (const ConstTensorView& t : in.initial) e.bytes += Bytes(t);
  for (const ConstTensorView& t : in.tensors) e.bytes += Bytes(t);
  call.Explain(op, ctx, definition, in, e);
  e.workspace_bytes = call.ForwardBytes(op, ctx, definition, in);
  if (causal && call.on_cpu() && !definition.table.states.empty()) {
    ExplainSegments(call.ranges, call.DivisionOf(definition, in), options.segment, ctx.num_threads(), e);
  }
  return e;
}

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_PASSES_INL_H_
