// PaTH attention: the checks of a call, and its tokens outside sequences.
#include "heed/ops/exact/path_attention/path_attention.h"

#include <cstdint>
#include <utility>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/transitions_check.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

namespace heed::path_attention {
namespace {

using mechanism::CheckContiguousRows;
using mechanism::CheckTensor;

// Checks the inputs and options, and adds them to `apart`. Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, bool values, mechanism::Apart& apart,
                   bool data = true) {
  Call call = transitions::CheckRows(op, in, data);
  CheckTensor(op, "w", in.w, {call.B, call.T, call.Hkv, call.D}, in.q.dtype(), data);
  CheckContiguousRows(op, "w", in.w);
  CheckTensor(op, "beta", in.beta, {call.B, call.T, call.Hkv}, transitions::DTypeOfFactor(in.beta, in.q.dtype()), data);
  transitions::CheckOptions(op, in, options, values, data, apart, call);
  apart.Reads("w", in.w);
  apart.Reads("beta", in.beta);
  return call;
}

// Checks a call that is only planned.
Call Planned(const char* op, const Inputs& in, const Options& options) {
  mechanism::Apart apart;
  return CheckedInputs(op, in, options, false, apart, false);
}

// Clears the gradients of tokens that belong to no sequence.
void ClearExcluded(const Call& call, const Gradients& out) {
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dw, &out.dbeta, &out.dlog_forget}) {
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
                               {"dw", out.dw, in.w, true},
                               {"dbeta", out.dbeta, in.beta, false},
                               {"dlog_forget", out.dlog_forget, in.log_forget, false}},
                              wide, apart);
  return call;
}

void CheckKeys(const char* op, const KeyInputs& in, const TensorView& keys) {
  mechanism::CheckFloat(op, "w", in.w);
  if (in.w.rank() != 4) mechanism::Fail(op, "w", "has shape " + in.w.ShapeString(), "[B, N, Hkv, D]");
  if (in.w.size(3) < 1) mechanism::Fail(op, "w", "has shape " + in.w.ShapeString(), "at least one channel");
  CheckTensor(op, "beta", in.beta, {in.w.size(0), in.w.size(1), in.w.size(2)},
              transitions::DTypeOfFactor(in.beta, in.w.dtype()), true);
  mechanism::Apart apart;
  apart.Reads("beta", in.beta);
  transitions::CheckKeys(op, "w", in.w, keys, apart);
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckForward("path_attention::Forward", in, options, out, false, ctx.checks());
  ComputeForward(ctx, call, in, out);
  transitions::ClearOutputs(call, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("path_attention::Backward", in, options, out, false, ctx.checks());
  ComputeBackward(ctx, call, in, out);
  ClearExcluded(call, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardMemory(ctx, Planned("path_attention::Workspace", in, options), in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BackwardMemory(ctx, Planned("path_attention::BackwardWorkspace", in, options), in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Planned("path_attention::Explain", in, options);
  const auto D = static_cast<double>(call.D), Dv = static_cast<double>(call.Dv);
  return transitions::Explained(ctx, "path_blocks",
                                "blocks of 64 rows pass over the keys, multiplied by one matrix for each block of 64",
                                call, {&in.q, &in.k, &in.v, &in.w, &in.beta, &in.log_forget},
                                2 * (D + Dv) + 2 * D * D / kBlock, ForwardMemory(ctx, call, in.q.dtype()));
}

void TransformKeys(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  const os::ScopedFloatControl float_control;
  CheckKeys("path_attention::TransformKeys", in, keys);
  ComputeKeys(ctx, in, keys);
}

}  // namespace heed::path_attention
