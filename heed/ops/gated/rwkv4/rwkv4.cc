// RWKV-4 on the recurrence engine.
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"

namespace heed::rwkv4 {
namespace {

recurrent::ConstState AsRecurrence(const ConstState& state) { return {state.num, state.den, state.max}; }
recurrent::State AsRecurrence(const State& state) { return {state.num, state.den, state.max}; }

recurrent::Inputs AsRecurrence(const Inputs& in) {
  recurrent::Inputs whole;
  whole.q = in.k;
  whole.v = in.v;
  whole.log_decay = in.log_decay;
  whole.u = in.u;
  whole.initial = AsRecurrence(in.initial);
  return whole;
}

recurrent::Outputs AsRecurrence(const Outputs& out) { return {out.o, AsRecurrence(out.final)}; }

}  // namespace

recurrent::BackwardInputs AsRecurrence(const BackwardInputs& in) {
  return {AsRecurrence(static_cast<const Inputs&>(in)), in.d_o, AsRecurrence(in.d_final)};
}

recurrent::Gradients AsRecurrence(const Gradients& out) {
  recurrent::Gradients whole;
  whole.dq = out.dk;
  whole.dv = out.dv;
  whole.dlog_decay = out.dlog_decay;
  whole.du = out.du;
  whole.dinitial = AsRecurrence(out.dinitial);
  return whole;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  recurrent::Forward("rwkv4::Forward", ctx, kDefinition, AsRecurrence(in), options, AsRecurrence(out));
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  recurrent::Backward("rwkv4::Backward", ctx, kDefinition, AsRecurrence(in), options, AsRecurrence(out));
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o) {
  recurrent::StepInputs whole = {in.k, {}, in.v, in.log_decay};
  whole.u = in.u;
  recurrent::Step("rwkv4::Step", ctx, kDefinition, whole, options, AsRecurrence(state), o);
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  ReferenceOfRecurrence(AsRecurrence(in), options, AsRecurrence(out));
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  BackwardReferenceOfRecurrence(AsRecurrence(in), options, AsRecurrence(out));
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Workspace("rwkv4::Workspace", ctx, kDefinition, AsRecurrence(in), options);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::BackwardWorkspace("rwkv4::BackwardWorkspace", ctx, kDefinition, AsRecurrence(in), options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  return recurrent::Explain("rwkv4::Explain", ctx, kDefinition, AsRecurrence(in), options);
}

}  // namespace heed::rwkv4
