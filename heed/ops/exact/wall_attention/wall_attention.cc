// Wall attention: the checks of a call, and its tokens outside sequences.
#include "heed/ops/exact/wall_attention/wall_attention.h"

#include <cstdint>
#include <string>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/transitions_check.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

namespace heed::wall_attention {
namespace {

using mechanism::Fail;

// Checks the inputs and options, and adds them to `apart`. Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, bool values, mechanism::Apart& apart,
                   bool data = true) {
  Call call = transitions::CheckRows(op, in, data);
  mechanism::CheckFloat(op, "log_decay", in.log_decay, data);
  if (in.log_decay.rank() != 4) Fail(op, "log_decay", "has shape " + in.log_decay.ShapeString(), "[B, T, Hg, D]");
  call.heads = in.log_decay.size(2);
  if (call.heads < 1 || call.heads % call.Hkv != 0 || call.H % call.heads != 0) {
    Fail(
        op, "log_decay", "has " + std::to_string(call.heads) + " heads",
        "a multiple of the " + std::to_string(call.Hkv) + " of k that divides the " + std::to_string(call.H) + " of q");
  }
  mechanism::CheckTensor(op, "log_decay", in.log_decay, {call.B, call.T, call.heads, call.D},
                         transitions::DTypeOfFactor(in.log_decay, in.q.dtype()), data);
  mechanism::CheckContiguousRows(op, "log_decay", in.log_decay);
  if (values) mechanism::CheckNotPositive(op, "log_decay", in.log_decay);
  transitions::CheckOptions(op, in, options, values, data, apart, call);
  apart.Reads("log_decay", in.log_decay);
  return call;
}

// Checks a call that is only planned.
Call Planned(const char* op, const Inputs& in, const Options& options) {
  mechanism::Apart apart;
  return CheckedInputs(op, in, options, false, apart, false);
}

// Clears the gradients of tokens that belong to no sequence.
void ClearExcluded(const Call& call, const Gradients& out) {
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dlog_decay, &out.dlog_forget}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide,
                  bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  transitions::CheckOutputs(op, call, in.q.dtype(), out, wide, apart);
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  transitions::CheckIncoming(op, call, in, wide, apart);
  transitions::CheckGradients(op,
                              {{"dq", out.dq, in.q, true},
                               {"dk", out.dk, in.k, true},
                               {"dv", out.dv, in.v, true},
                               {"dlog_decay", out.dlog_decay, in.log_decay, true},
                               {"dlog_forget", out.dlog_forget, in.log_forget, false}},
                              wide, apart);
  return call;
}

void CheckKeys(const char* op, const KeyInputs& in, const TensorView& keys, bool values) {
  const ConstTensorView& log_decay = in.log_decay;
  mechanism::CheckFloat(op, "log_decay", log_decay);
  if (log_decay.rank() != 4) Fail(op, "log_decay", "has shape " + log_decay.ShapeString(), "[B, N, Hg, D]");
  if (log_decay.size(3) < 1) Fail(op, "log_decay", "has shape " + log_decay.ShapeString(), "at least one channel");
  mechanism::CheckReadable(op, "log_decay", log_decay);
  if (values) mechanism::CheckNotPositive(op, "log_decay", log_decay);
  mechanism::Apart apart;
  transitions::CheckKeys(op, "log_decay", log_decay, keys, apart);
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckForward("wall_attention::Forward", in, options, out, false, ctx.checks());
  ComputeForward(ctx, call, in, out);
  transitions::ClearOutputs(call, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("wall_attention::Backward", in, options, out, false, ctx.checks());
  ComputeBackward(ctx, call, in, out);
  ClearExcluded(call, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardMemory(ctx, Planned("wall_attention::Workspace", in, options), in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BackwardMemory(ctx, Planned("wall_attention::BackwardWorkspace", in, options), in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Planned("wall_attention::Explain", in, options);
  const auto D = static_cast<double>(call.D), Dv = static_cast<double>(call.Dv);
  return transitions::Explained(
      ctx, "wall_blocks", "blocks of 64 rows pass over the keys, with one decay per channel for each block of 64", call,
      {&in.q, &in.k, &in.v, &in.log_decay, &in.log_forget}, 2 * (D + Dv), ForwardMemory(ctx, call, in.q.dtype()));
}

void TransformKeys(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  const os::ScopedFloatControl float_control;
  CheckKeys("wall_attention::TransformKeys", in, keys, ctx.checks());
  ComputeKeys(ctx, in, keys);
}

}  // namespace heed::wall_attention
