// Attention residuals: the checks of a call.
#include "heed/ops/exact/attention_residual/attention_residual.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/exact/attention_residual/attention_residual_internal.h"

namespace heed::attention_residual {
namespace {

using mechanism::Axes;
using mechanism::CheckTensor;
using mechanism::Fail;

void CheckChannels(const char* op, const char* name, const ConstTensorView& t, const ConstTensorView& residuals,
                   bool data) {
  mechanism::CheckFloat(op, name, t, data);
  CheckTensor(op, name, t, {residuals.size(residuals.rank() - 1)}, t.dtype(), data);
  if (t.dtype() == DType::kF64 && residuals.dtype() != DType::kF64) {
    Fail(op, name, "has dtype f64", std::string("f32, bf16 or f16 beside ") + Name(residuals.dtype()));
  }
}

// Without `data`, pointers may be null.
mechanism::Apart CheckedInputs(const char* op, const Inputs& in, const Options& options, bool data = true) {
  const ConstTensorView& v = in.residuals;
  mechanism::CheckFloat(op, "residuals", v, data);
  if (v.rank() < 3) Fail(op, "residuals", "has shape " + v.ShapeString(), "[L, ..., D] with 1 to 4 axes of tokens");
  if (v.size(0) < 1) Fail(op, "residuals", "has shape " + v.ShapeString(), "at least one layer");
  if (v.size(v.rank() - 1) < 1) Fail(op, "residuals", "has shape " + v.ShapeString(), "at least one channel");
  CheckTensor(op, "residuals", v, v.sizes(), v.dtype(), data);
  mechanism::CheckContiguousRows(op, "residuals", v);
  CheckChannels(op, "query", in.query, v, data);
  if (in.weight.present()) CheckChannels(op, "weight", in.weight, v, data);
  if (!(options.eps >= 0) || std::isinf(options.eps)) {
    Fail(op, "eps", "is " + mechanism::Text(options.eps), "a number >= 0");
  }
  if (!std::isfinite(options.scale)) Fail(op, "scale", "is " + mechanism::Text(options.scale), "a finite number");
  mechanism::Apart apart;
  apart.Reads("query", in.query);
  apart.Reads("residuals", v);
  apart.Reads("weight", in.weight);
  return apart;
}

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

}  // namespace

void CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide) {
  mechanism::Apart apart = CheckedInputs(op, in, options);
  const auto sizes = in.residuals.sizes();
  apart.Writes(op, "o", out.o, sizes.subspan(1), DTypeOf(out.o, in.residuals.dtype(), wide));
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (!out.weights.present()) return;
  apart.Writes(op, "weights", out.weights, sizes.first(sizes.size() - 1),
               DTypeOf(out.weights, mechanism::StateDType(in.residuals.dtype()), wide));
}

void CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide) {
  mechanism::Apart apart = CheckedInputs(op, in, options);
  CheckTensor(op, "d_o", in.d_o, in.residuals.sizes().subspan(1), in.residuals.dtype(), true);
  mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  apart.Reads("d_o", in.d_o);
  for (const auto& [name, view, of] : {std::tuple{"dquery", out.dquery, in.query},
                                       {"dresiduals", out.dresiduals, in.residuals},
                                       {"dweight", out.dweight, in.weight}}) {
    if (!view.present()) continue;
    if (!of.present()) Fail(op, name, "is asked for", "weight with it");
    apart.Writes(op, name, view, of.sizes(), DTypeOf(view, of.dtype(), wide));
  }
  if (out.dresiduals.present()) mechanism::CheckContiguousRows(op, "dresiduals", out.dresiduals);
}

int64_t NumTokens(const Inputs& in) {
  int64_t count = 1;
  for (int axis = 1; axis + 1 < in.residuals.rank(); ++axis) count *= in.residuals.size(axis);
  return count;
}

int64_t TokenOffset(const ConstTensorView& t, int first_axis, int end_axis, int64_t token) {
  int64_t offset = 0;
  for (int axis = end_axis - 1; axis >= first_axis; --axis) {
    offset += token % t.size(axis) * t.stride(axis);
    token /= t.size(axis);
  }
  return offset;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  const os::ScopedFloatControl float_control;
  CheckForward("attention_residual::Forward", in, options, out, false);
  ComputeRows(ctx, in, options, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  const os::ScopedFloatControl float_control;
  CheckBackward("attention_residual::Backward", in, options, out, false);
  ComputeRowGradients(ctx, in, options, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  CheckedInputs("attention_residual::Workspace", in, options, false);
  return RowsMemory(in).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  CheckedInputs("attention_residual::BackwardWorkspace", in, options, false);
  return RowGradientsMemory(in, true).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  CheckedInputs("attention_residual::Explain", in, options, false);
  Explanation e;
  e.kernel = "attention_residual_rows";
  e.target = TargetName(ctx.allowed_targets());
  e.why = "tokens one by one, four layers at a time, each of whose rows is read from memory once";
  e.flops = 6 * static_cast<double>(in.residuals.num_elements());
  const double layers = static_cast<double>(in.residuals.size(0));
  e.bytes = mechanism::Bytes(in.residuals) * (1 + 1 / layers);  // and o
  e.bytes += mechanism::Bytes(in.query) + mechanism::Bytes(in.weight);
  e.workspace_bytes = RowsMemory(in).bytes(ctx);
  return e;
}

}  // namespace heed::attention_residual
