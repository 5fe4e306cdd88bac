// Log-linear attention: the checks of a call, and its tokens outside sequences.
#include "heed/ops/gated/log_linear_attention/log_linear_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/gated/log_linear_attention/log_linear_attention_internal.h"

namespace heed::log_linear_attention {
namespace {

using mechanism::Axes;
using mechanism::CheckTensor;
using mechanism::Fail;

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// The tokens before each sequence. Without `data`, there may be none, which counts as 0.
std::vector<int64_t> PositionsOf(const char* op, const ConstTensorView& t, size_t sequences, bool data) {
  if (!t.present()) return std::vector<int64_t>(sequences);
  if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) {
    Fail(op, "positions", std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  }
  CheckTensor(op, "positions", t, {static_cast<int64_t>(sequences)}, t.dtype(), data);
  if (!data && t.data() == nullptr) return std::vector<int64_t>(sequences);
  std::vector<int64_t> values;
  for (int64_t i = 0; i < t.size(0); ++i) values.push_back(LoadAsInt64(t.dtype(), t.data(), i * t.stride(0)));
  return values;
}

// Checks the inputs and options, and adds them to `apart`. The states before the first token are called `state_name`.
// Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, bool values, mechanism::Apart& apart,
                   const char* state_name = "initial_state", bool data = true) {
  mechanism::CheckFloat(op, "q", in.q, data);
  if (in.q.rank() != 4) Fail(op, "q", "has shape " + in.q.ShapeString(), "[B, T, H, K]");
  mechanism::CheckFloat(op, "v", in.v, data);
  if (in.v.rank() != 4) Fail(op, "v", "has shape " + in.v.ShapeString(), "[B, T, HV, V]");
  mechanism::CheckFloat(op, "level_scales", in.level_scales, data);
  if (in.level_scales.rank() != 4) {
    Fail(op, "level_scales", "has shape " + in.level_scales.ShapeString(), "[B, T, HV, L]");
  }
  Call call;
  call.B = in.q.size(0);
  call.T = in.q.size(1);
  call.H = in.q.size(2);
  call.K = in.q.size(3);
  call.G = in.v.size(2);
  call.V = in.v.size(3);
  call.L = in.level_scales.size(3);
  for (const auto& [name, view, size] : {std::tuple{"q", in.q, call.K}, {"v", in.v, call.V}}) {
    if (size < 1) Fail(op, name, "has shape " + view.ShapeString(), "at least one channel");
  }
  if (call.L < 1) Fail(op, "level_scales", "has shape " + in.level_scales.ShapeString(), "at least one level");
  if (call.H == 0 ? call.G != 0 : call.G % call.H != 0) {
    Fail(op, "v", "has " + std::to_string(call.G) + " heads",
         "a multiple of the " + std::to_string(call.H) + " heads of q");
  }
  const DType dtype = in.q.dtype(), wide = mechanism::StateDType(dtype);
  CheckTensor(op, "q", in.q, in.q.sizes(), dtype, data);
  CheckTensor(op, "k", in.k, in.q.sizes(), dtype, data);
  CheckTensor(op, "v", in.v, {call.B, call.T, call.G, call.V}, dtype, data);
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
    mechanism::CheckContiguousRows(op, name, view);
  }
  const auto factor = [&](const char* name, const ConstTensorView& t, const Axes& shape) {
    CheckTensor(op, name, t, shape, t.present() && t.dtype() == wide ? wide : dtype, data);
  };
  factor("level_scales", in.level_scales, {call.B, call.T, call.G, call.L});
  if (in.log_decay.present()) {
    factor("log_decay", in.log_decay, {call.B, call.T, call.G});
    if (values) mechanism::CheckNotPositive(op, "log_decay", in.log_decay);
  }
  call.scale = options.scale.value_or(1);
  if (!std::isfinite(call.scale)) Fail(op, "scale", "is " + mechanism::Text(call.scale), "a finite number");
  const auto ranges = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  const auto count = static_cast<int64_t>(ranges.size());
  if (in.initial_state.present()) {
    CheckTensor(op, state_name, in.initial_state, {count, call.G, call.L, call.K, call.V}, wide, data);
    if (!options.positions.present())
      Fail(op, "positions", "is absent", std::string("the tokens before, with ") + state_name);
  }
  const std::vector<int64_t> positions = PositionsOf(op, options.positions, ranges.size(), data);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int64_t tokens = ranges[i].end - ranges[i].begin;
    const std::string name = "positions[" + std::to_string(i) + "]";
    if (positions[i] < 0) Fail(op, name.c_str(), "is " + std::to_string(positions[i]), "0 or more");
    if (positions[i] > 0 && !in.initial_state.present()) {
      Fail(op, name.c_str(), "is " + std::to_string(positions[i]), "0 without initial_state");
    }
    const int64_t most = call.L > 62 ? INT64_MAX / 2 : int64_t{1} << (call.L - 1);
    if (positions[i] > most || tokens > most - positions[i]) {
      Fail(op, "level_scales", "has " + std::to_string(call.L) + " levels",
           "enough for " + std::to_string(positions[i] + tokens) + " tokens: L levels are for 2^(L - 1)");
    }
    call.sequences.push_back({ranges[i].batch, ranges[i].begin, ranges[i].end, positions[i]});
  }
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"level_scales", in.level_scales},
                                   {"log_decay", in.log_decay},
                                   {state_name, in.initial_state},
                                   {"positions", options.positions},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
  return call;
}

void ClearOthers(const Call& call, const TensorView& t) {
  std::vector<mechanism::TokenRange> ranges;
  for (const Sequence& s : call.sequences) ranges.push_back({s.batch, s.begin, s.end});
  mechanism::ClearOthers(ranges, t);
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
  const DType dtype = in.q.dtype();
  apart.Writes(op, "o", out.o, {call.B, call.T, call.G, call.V}, DTypeOf(out.o, dtype, wide));
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.final_state.present()) {
    apart.Writes(op, "final_state", out.final_state,
                 {static_cast<int64_t>(call.sequences.size()), call.G, call.L, call.K, call.V},
                 DTypeOf(out.final_state, mechanism::StateDType(dtype), wide));
  }
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  CheckTensor(op, "d_o", in.d_o, in.v.sizes(), in.q.dtype(), true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  apart.Reads("d_o", in.d_o);
  if (in.d_final_state.present()) {
    CheckTensor(op, "d_state", in.d_final_state,
                {static_cast<int64_t>(call.sequences.size()), call.G, call.L, call.K, call.V},
                mechanism::StateDType(in.q.dtype()), true);
    apart.Reads("d_state", in.d_final_state);
  }
  for (const auto& [name, view, of, rows] : {std::tuple{"dq", out.dq, in.q, true},
                                             {"dk", out.dk, in.k, true},
                                             {"dv", out.dv, in.v, true},
                                             {"dlevel_scales", out.dlevel_scales, in.level_scales, false},
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
  const Call call = CheckForward("log_linear_attention::Forward", in, options, out, false, ctx.checks());
  ComputeForward(ctx, call, in, out);
  ClearOthers(call, out.o);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("log_linear_attention::Backward", in, options, out, false, ctx.checks());
  ComputeBackward(ctx, call, in, out);
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dlevel_scales, &out.dlog_decay}) ClearOthers(call, *t);
}

void Step(Context& ctx, const StepInputs& in, const Options& options, const TensorView& state, const TensorView& o) {
  constexpr char kOp[] = "log_linear_attention::Step";
  const os::ScopedFloatControl float_control;
  if (in.initial_state.present()) mechanism::Fail(kOp, "initial_state", "is given", "none: a step updates its state");
  Inputs token;
  token.q = mechanism::OneToken(kOp, "q", in.q);
  token.k = mechanism::OneToken(kOp, "k", in.k);
  token.v = mechanism::OneToken(kOp, "v", in.v);
  token.level_scales = mechanism::OneToken(kOp, "level_scales", in.level_scales);
  if (in.log_decay.present()) token.log_decay = mechanism::OneToken(kOp, "log_decay", in.log_decay);
  token.initial_state = state;
  if (!state.present()) mechanism::Fail(kOp, "state", "is absent", "the states of the tokens so far");
  Options of_token;
  of_token.scale = options.scale;
  of_token.positions = options.positions;
  mechanism::Apart apart;
  const Call call = CheckedInputs(kOp, token, of_token, ctx.checks(), apart, "state");
  mechanism::Apart outputs;
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"level_scales", in.level_scales},
                                   {"log_decay", in.log_decay},
                                   {"positions", options.positions}}) {
    outputs.Reads(name, view);
  }
  outputs.Writes(kOp, "state", state);
  outputs.Writes(kOp, "o", o, {call.B, call.G, call.V}, in.q.dtype());
  mechanism::CheckContiguousRows(kOp, "o", o);
  ComputeStep(ctx, call, token, state, o);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardMemory(ctx, Planned("log_linear_attention::Workspace", in, options), in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BackwardMemory(ctx, Planned("log_linear_attention::BackwardWorkspace", in, options), in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Planned("log_linear_attention::Explain", in, options);
  const auto K = static_cast<double>(call.K), V = static_cast<double>(call.V);
  Explanation e;
  e.kernel = "log_linear_chunks";
  e.target = TargetName(ctx.allowed_targets());
  e.why = "chunks of 64 tokens, which multiply by each other and by a state for each bit of the tokens before them";
  for (const Sequence& s : call.sequences) {
    // Pairs of a chunk, the states of half of the bits of its place, and its own sum.
    const auto tokens = static_cast<double>(s.end - s.begin), end = tokens + static_cast<double>(s.position);
    const double bits = end > 64 ? std::log2(end / 64) / 2 : 0;
    e.flops += static_cast<double>(call.G) * tokens * (64 * (K + V) + 2 * K * V * (1 + bits));
  }
  e.bytes = mechanism::Bytes(in.v);  // of o
  for (const ConstTensorView* t : {&in.q, &in.k, &in.v, &in.level_scales, &in.log_decay, &in.initial_state}) {
    e.bytes += mechanism::Bytes(*t);
  }
  e.workspace_bytes = ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
  return e;
}

}  // namespace heed::log_linear_attention
