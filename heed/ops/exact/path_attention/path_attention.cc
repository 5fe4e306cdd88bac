// PaTH attention: the checks of a call, and its tokens outside sequences.
#include "heed/ops/exact/path_attention/path_attention.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

namespace heed::path_attention {
namespace {

using mechanism::Axes;
using mechanism::CheckContiguousRows;
using mechanism::CheckTensor;
using mechanism::Fail;

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// Checks the inputs and options, and adds them to `apart`.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, bool values, mechanism::Apart& apart) {
  for (const auto& [name, view, shape] :
       {std::tuple{"q", in.q, "[B, T, H, D]"}, {"k", in.k, "[B, T, Hkv, D]"}, {"v", in.v, "[B, T, Hkv, Dv]"}}) {
    mechanism::CheckFloat(op, name, view);
    if (view.rank() != 4) Fail(op, name, "has shape " + view.ShapeString(), shape);
    for (const int axis : {2, 3}) {
      if (view.size(axis) < 1) {
        Fail(op, name, "has shape " + view.ShapeString(), axis == 2 ? "at least one head" : "at least one channel");
      }
    }
  }
  Call call;
  call.B = in.q.size(0);
  call.T = in.q.size(1);
  call.H = in.q.size(2);
  call.D = in.q.size(3);
  call.Hkv = in.k.size(2);
  call.Dv = in.v.size(3);
  const DType dtype = in.q.dtype(), wide = mechanism::StateDType(dtype);
  if (call.H % call.Hkv != 0) {
    Fail(op, "q", "has " + std::to_string(call.H) + " heads",
         "a multiple of the " + std::to_string(call.Hkv) + " of k");
  }
  const Axes of_keys = {call.B, call.T, call.Hkv, call.D};
  CheckTensor(op, "k", in.k, of_keys, dtype, true);
  CheckTensor(op, "v", in.v, {call.B, call.T, call.Hkv, call.Dv}, dtype, true);
  CheckTensor(op, "w", in.w, of_keys, dtype, true);
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}, {"w", in.w}}) {
    CheckContiguousRows(op, name, view);
  }
  const auto factor = [&](const char* name, const ConstTensorView& t, const Axes& shape) {
    CheckTensor(op, name, t, shape, t.present() && t.dtype() == wide ? wide : dtype, true);
  };
  factor("beta", in.beta, {call.B, call.T, call.Hkv});
  if (in.log_forget.present()) {
    factor("log_forget", in.log_forget, {call.B, call.T, call.H});
    if (values) mechanism::CheckNotPositive(op, "log_forget", in.log_forget);
  }
  call.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(call.D)));
  if (!std::isfinite(call.scale)) Fail(op, "scale", "is " + mechanism::Text(call.scale), "a finite number");
  call.sequences = mechanism::RangesOf(op, "q", in.q, options);
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"w", in.w},
                                   {"beta", in.beta},
                                   {"log_forget", in.log_forget},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
  return call;
}

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide,
                  bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  apart.Writes(op, "o", out.o, {call.B, call.T, call.H, call.Dv}, DTypeOf(out.o, in.q.dtype(), wide));
  CheckContiguousRows(op, "o", out.o);
  if (out.lse.present()) {
    apart.Writes(op, "lse", out.lse, {call.B, call.H, call.T},
                 DTypeOf(out.lse, mechanism::StateDType(in.q.dtype()), wide));
  }
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide,
                   bool values) {
  mechanism::Apart apart;
  Call call = CheckedInputs(op, in, options, values, apart);
  const DType dtype = in.q.dtype(), of_lse = mechanism::StateDType(dtype);
  const Axes rows = {call.B, call.T, call.H, call.Dv}, sums = {call.B, call.H, call.T};
  for (const auto& [name, view] : {std::pair{"d_o", in.d_o}, {"o", in.o}}) {
    CheckTensor(op, name, view, rows, dtype, true);
    CheckContiguousRows(op, name, view);
    apart.Reads(name, view);
    if (wide) break;  // the reference reads no results
  }
  if (!wide) CheckTensor(op, "lse", in.lse, sums, of_lse, true);
  if (in.d_lse.present()) CheckTensor(op, "d_lse", in.d_lse, sums, of_lse, true);
  apart.Reads("lse", in.lse);
  apart.Reads("d_lse", in.d_lse);
  for (const auto& [name, view, of, contiguous] : {std::tuple{"dq", out.dq, in.q, true},
                                                   {"dk", out.dk, in.k, true},
                                                   {"dv", out.dv, in.v, true},
                                                   {"dw", out.dw, in.w, true},
                                                   {"dbeta", out.dbeta, in.beta, false},
                                                   {"dlog_forget", out.dlog_forget, in.log_forget, false}}) {
    if (!view.present()) continue;
    if (!of.present()) Fail(op, name, "is asked for", "none: there is no such input");
    apart.Writes(op, name, view, of.sizes(), DTypeOf(view, of.dtype(), wide));
    if (contiguous) CheckContiguousRows(op, name, view);
  }
  return call;
}

void CheckKeys(const char* op, const KeyInputs& in, const TensorView& keys) {
  mechanism::CheckFloat(op, "w", in.w);
  if (in.w.rank() != 4) Fail(op, "w", "has shape " + in.w.ShapeString(), "[B, N, Hkv, D]");
  if (in.w.size(3) < 1) Fail(op, "w", "has shape " + in.w.ShapeString(), "at least one channel");
  const int64_t B = in.w.size(0), N = in.w.size(1), heads = in.w.size(2), D = in.w.size(3);
  const DType dtype = in.w.dtype(), wide = mechanism::StateDType(dtype);
  const auto either = [&](const ConstTensorView& t) { return t.present() && t.dtype() == wide ? wide : dtype; };
  CheckTensor(op, "beta", in.beta, {B, N, heads}, either(in.beta), true);
  if (!keys.present()) Fail(op, "keys", "is absent", "a tensor");
  if (keys.rank() != 4 || keys.size(1) < N) {
    Fail(op, "keys", "has shape " + keys.ShapeString(),
         "[" + std::to_string(B) + ", at least " + std::to_string(N) + ", " + std::to_string(heads) + ", " +
             std::to_string(D) + "]");
  }
  mechanism::Apart apart;
  apart.Reads("w", in.w);
  apart.Reads("beta", in.beta);
  apart.Writes(op, "keys", keys, {B, keys.size(1), heads, D}, either(keys));
  CheckContiguousRows(op, "w", in.w);
  CheckContiguousRows(op, "keys", keys);
}

void ClearExcluded(const Call& call, const Outputs& out) {
  mechanism::ClearOthers(call.sequences, out.o);
  if (!out.lse.present()) return;
  mechanism::ForOthers(call.sequences, call.B, call.T, [&](int64_t b, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < call.H; ++h) {
      for (int64_t t = begin; t < end; ++t) {
        StoreDouble(out.lse.dtype(), out.lse.data(),
                    b * out.lse.stride(0) + h * out.lse.stride(1) + t * out.lse.stride(2),
                    -std::numeric_limits<double>::infinity());
      }
    }
  });
}

void ClearExcluded(const Call& call, const Gradients& out) {
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dw, &out.dbeta, &out.dlog_forget}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckForward("path_attention::Forward", in, options, out, false, ctx.checks());
  ComputeForward(ctx, call, in, out);
  ClearExcluded(call, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("path_attention::Backward", in, options, out, false, ctx.checks());
  ComputeBackward(ctx, call, in, out);
  ClearExcluded(call, out);
}

void TransformKeys(Context& ctx, const KeyInputs& in, const TensorView& keys) {
  const os::ScopedFloatControl float_control;
  CheckKeys("path_attention::TransformKeys", in, keys);
  ComputeKeys(ctx, in, keys);
}

}  // namespace heed::path_attention
