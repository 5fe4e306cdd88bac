// Parallax attention: the checks of a call, and its tokens outside sequences.
#include "heed/ops/exact/parallax_attention/parallax_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/token_blocks_internal.h"
#include "heed/ops/exact/parallax_attention/parallax_attention_internal.h"

namespace heed::parallax_attention {
namespace {

using mechanism::Axes;
using mechanism::CheckContiguousRows;
using mechanism::CheckTensor;
using mechanism::Fail;

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// Checks that it is a float [B, T, heads, channels], and neither heads nor channels are 0.
void CheckRows(const char* op, const char* name, const ConstTensorView& t, const char* shape, bool data) {
  mechanism::CheckFloat(op, name, t, data);
  if (t.rank() != 4) Fail(op, name, "has shape " + t.ShapeString(), shape);
  for (const int axis : {2, 3}) {
    if (t.size(axis) < 1) {
      Fail(op, name, "has shape " + t.ShapeString(), axis == 2 ? "at least one head" : "at least one channel");
    }
  }
}

// Checks the inputs and options, and adds them to `apart`. Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, mechanism::Apart& apart,
                   bool data = true) {
  CheckRows(op, "q", in.q, "[B, Tq, H, D]", data);
  CheckRows(op, "k", in.k, "[B, Tk, Hkv, D]", data);
  CheckRows(op, "v", in.v, "[B, Tk, Hkv, Dv]", data);
  Call call;
  call.B = in.q.size(0);
  call.Tq = in.q.size(1);
  call.H = in.q.size(2);
  call.D = in.q.size(3);
  call.Tk = in.k.size(1);
  call.Hkv = in.k.size(2);
  call.Dv = in.v.size(3);
  if (call.H % call.Hkv != 0) {
    Fail(op, "q", "has " + std::to_string(call.H) + " heads",
         "a multiple of the " + std::to_string(call.Hkv) + " of k");
  }
  const DType dtype = in.q.dtype();
  const Axes of_rows = {call.B, call.Tq, call.H, call.D};
  for (const auto& [name, view, shape] : {std::tuple{"q", in.q, of_rows},
                                          {"r", in.r, of_rows},
                                          {"k", in.k, Axes{call.B, call.Tk, call.Hkv, call.D}},
                                          {"v", in.v, Axes{call.B, call.Tk, call.Hkv, call.Dv}}}) {
    CheckTensor(op, name, view, shape, dtype, data);
    CheckContiguousRows(op, name, view);
  }
  if (call.Tq > call.Tk || (call.Tq < call.Tk && options.cu_seqlens.present())) {
    Fail(op, "q", "has " + std::to_string(call.Tq) + " tokens",
         (options.cu_seqlens.present() ? "the " : "at most the ") + std::to_string(call.Tk) + " of k" +
             (options.cu_seqlens.present() ? ", as sequences are packed" : ""));
  }
  if (options.window < 0) Fail(op, "window", "is " + std::to_string(options.window), "at least 0");
  call.window = options.window;
  call.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(call.D)));
  if (!std::isfinite(call.scale)) Fail(op, "scale", "is " + mechanism::Text(call.scale), "a finite number");
  call.sequences = mechanism::RangesOf(op, "k", in.k, options, 1, data);
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"r", in.r},
                                   {"k", in.k},
                                   {"v", in.v},
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
  return CheckedInputs(op, in, options, apart, false);
}

// The rows of each sequence, as tokens of q.
std::vector<mechanism::TokenRange> RowsOf(const Call& call) {
  std::vector<mechanism::TokenRange> rows;
  for (const mechanism::TokenRange& s : call.sequences) {
    const int64_t begin = std::max<int64_t>(s.begin - call.first(), 0);
    rows.push_back({s.batch, begin, std::max(s.end - call.first(), begin)});
  }
  return rows;
}

}  // namespace

double Pairs(const Call& call, bool whole) {
  constexpr int64_t kBlock = token_blocks::kBlock;
  double pairs = 0;
  for (const mechanism::TokenRange& s : call.sequences) {
    for (int64_t t = std::max<int64_t>(call.first() - s.begin, 0); t < s.end - s.begin; ++t) {
      int64_t first = call.first_key(t), end = t + 1;
      if (whole) {  // the block's first row sees the first keys
        first = call.first_key(std::max(t / kBlock * kBlock, call.first() - s.begin)) / kBlock * kBlock;
        end = std::min((t / kBlock + 1) * kBlock, s.end - s.begin);
      }
      pairs += static_cast<double>(end - first);
    }
  }
  return pairs * static_cast<double>(call.H);
}

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide) {
  mechanism::Apart apart;
  const Call call = CheckedInputs(op, in, options, apart);
  const Axes rows = {call.B, call.Tq, call.H, call.Dv}, sums = {call.B, call.H, call.Tq};
  const DType state = mechanism::StateDType(in.q.dtype());
  apart.Writes(op, "o", out.o, rows, DTypeOf(out.o, in.q.dtype(), wide));
  CheckContiguousRows(op, "o", out.o);
  if (out.m.present()) {
    apart.Writes(op, "m", out.m, rows, DTypeOf(out.m, state, wide));
    CheckContiguousRows(op, "m", out.m);
  }
  if (out.a.present()) apart.Writes(op, "a", out.a, sums, DTypeOf(out.a, state, wide));
  if (out.lse.present()) apart.Writes(op, "lse", out.lse, sums, DTypeOf(out.lse, state, wide));
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide) {
  mechanism::Apart apart;
  const Call call = CheckedInputs(op, in, options, apart);
  const DType dtype = in.q.dtype(), state = mechanism::StateDType(dtype);
  const Axes of_rows = {call.B, call.Tq, call.H, call.Dv}, sums = {call.B, call.H, call.Tq};
  const auto read = [&](const char* name, const ConstTensorView& t, const Axes& shape, DType of) {
    CheckTensor(op, name, t, shape, of, true);
    if (t.rank() == 4) CheckContiguousRows(op, name, t);
    apart.Reads(name, t);
  };
  read("d_o", in.d_o, of_rows, dtype);
  if (!wide) {  // the reference does not read these
    read("o", in.o, of_rows, dtype);
    read("m", in.m, of_rows, state);
    read("a", in.a, sums, state);
    read("lse", in.lse, sums, state);
  }
  if (in.d_lse.present()) read("d_lse", in.d_lse, sums, state);
  for (const auto& [name, gradient, of] :
       {std::tuple{"dq", out.dq, in.q}, {"dr", out.dr, in.r}, {"dk", out.dk, in.k}, {"dv", out.dv, in.v}}) {
    if (!gradient.present()) continue;
    apart.Writes(op, name, gradient, of.sizes(), DTypeOf(gradient, dtype, wide));
    CheckContiguousRows(op, name, gradient);
  }
  return call;
}

void ClearExcluded(const Call& call, const Outputs& out) {
  const std::vector<mechanism::TokenRange> rows = RowsOf(call);
  mechanism::ClearOthers(rows, out.o);
  mechanism::ClearOthers(rows, out.m);
  mechanism::ClearOthers(rows, out.a, 2);
  if (!out.lse.present()) return;
  mechanism::ForOthers(rows, call.B, call.Tq, [&](int64_t b, int64_t begin, int64_t end) {
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
  const std::vector<mechanism::TokenRange> rows = RowsOf(call);
  for (const TensorView* t : {&out.dq, &out.dr}) mechanism::ClearOthers(rows, *t);
  for (const TensorView* t : {&out.dk, &out.dv}) mechanism::ClearOthers(call.sequences, *t);
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckForward("parallax_attention::Forward", in, options, out, false);
  ComputeForward(ctx, call, in, out);
  ClearExcluded(call, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward("parallax_attention::Backward", in, options, out, false);
  ComputeBackward(ctx, call, in, out);
  ClearExcluded(call, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardMemory(ctx, Planned("parallax_attention::Workspace", in, options), in.q.dtype()).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BackwardMemory(ctx, Planned("parallax_attention::BackwardWorkspace", in, options), in.q.dtype()).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Planned("parallax_attention::Explain", in, options);
  Explanation e;
  e.kernel = "parallax_blocks";
  e.target = TargetName(ctx.allowed_targets());
  e.why = "tiles of 64 rows pass over blocks of 64 keys, with an online softmax and an online covariance";
  e.flops = 4 * static_cast<double>(call.D + call.Dv) * Pairs(call, false);
  e.visited_pairs = Pairs(call, true);
  e.bytes = static_cast<double>(call.B * call.Tq * call.H * call.Dv) * static_cast<double>(SizeOf(in.q.dtype()));  // o
  for (const ConstTensorView* t : {&in.q, &in.r, &in.k, &in.v}) e.bytes += mechanism::Bytes(*t);
  e.workspace_bytes = ForwardMemory(ctx, call, in.q.dtype()).bytes(ctx);
  return e;
}

}  // namespace heed::parallax_attention
