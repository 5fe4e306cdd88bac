// Token shift with gradients: checks, tasks, and the sum over tasks for the gradient of the mixes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "heed/core/os.h"
#include "heed/layers/shifted_rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::CheckTensor;
using mechanism::Fail;

constexpr char kOp[] = "token_shift";

mechanism::Apart CheckedInputs(const ShiftedRows& in) {
  mechanism::CheckFloat(kOp, "x", in.x);
  if (in.x.rank() != 3) Fail(kOp, "x", "has shape " + in.x.ShapeString(), "[B, T, C]");
  if (in.mix.rank() != 2) Fail(kOp, "mix", "has shape " + in.mix.ShapeString(), "[M, C]");
  const DType dtype = in.x.dtype();
  const int64_t C = in.x.size(2);
  CheckTensor(kOp, "x", in.x, in.x.sizes(), dtype, true);
  CheckTensor(kOp, "mix", in.mix, {in.mix.size(0), C}, dtype, true);
  if (in.first.present()) CheckTensor(kOp, "first", in.first, {in.x.size(0), C}, dtype, true);
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::tuple{"x", in.x}, {"first", in.first}, {"mix", in.mix}}) {
    if (view.present()) mechanism::CheckContiguousRows(kOp, name, view);
    apart.Reads(name, view);
  }
  return apart;
}

mechanism::Axes ShapeOfResult(const ShiftedRows& in) {
  return {in.mix.size(0), in.x.size(0), in.x.size(1), in.x.size(2)};
}

template <class T>
void SumPartials(const T* partials, int64_t tasks, const TensorView& dmix) {
  const int64_t M = dmix.size(0), C = dmix.size(1);
  for (int64_t i = 0; i < M * C; ++i) {
    double sum = 0;
    for (int64_t task = 0; task < tasks; ++task) sum += static_cast<double>(partials[task * M * C + i]);
    StoreDouble(dmix.dtype(), dmix.data(), i / C * dmix.stride(0) + i % C * dmix.stride(1), sum);
  }
}

void Run(Context& ctx, ShiftedRowsCall& c) {
  const ConstTensorView& x = c.in.x;
  const int64_t rows = x.size(0) * x.size(1), C = x.size(2);
  // A task is worth its start, and few tasks have sums of their own.
  constexpr int64_t kElements = 16384, kMostTasks = 64;
  int64_t rows_of_task = std::max<int64_t>(1, kElements / std::max<int64_t>(1, C));
  const TensorView& dmix = c.out.dmix;
  if (dmix.present()) rows_of_task = std::max(rows_of_task, (rows + kMostTasks - 1) / kMostTasks);
  const int64_t tasks = (rows + rows_of_task - 1) / rows_of_task;
  const bool is_f64 = x.dtype() == DType::kF64;
  if (dmix.present()) {
    const int64_t bytes = tasks * dmix.num_elements() * (is_f64 ? 8 : 4);
    ctx.ReserveShared(bytes);
    c.partials = ctx.Shared();
    if (bytes > 0) std::memset(c.partials, 0, static_cast<size_t>(bytes));
  }
  for (int64_t i = 0; x.size(1) == 0 && c.out.dfirst.present() && i < x.size(0) * C; ++i) {
    StoreDouble(x.dtype(), c.out.dfirst.data(), i / C * c.out.dfirst.stride(0) + i % C, 0);
  }
  const ShiftedRowsKernel kernel = ShiftedRowsKernelFor(ctx);
  ctx.ParallelFor(tasks, [&](int64_t task, int) {
    const int64_t begin = task * rows_of_task;
    kernel(c, task, begin, std::min(rows, begin + rows_of_task));
  });
  if (!dmix.present()) return;
  if (is_f64) {
    SumPartials(static_cast<const double*>(c.partials), tasks, dmix);
  } else {
    SumPartials(static_cast<const float*>(c.partials), tasks, dmix);
  }
}

}  // namespace

void ShiftedRowsForward(Context& ctx, const ShiftedRows& in, const TensorView& y) {
  const os::ScopedFloatControl float_control;
  mechanism::Apart apart = CheckedInputs(in);
  apart.Writes(kOp, "y", y, ShapeOfResult(in), in.x.dtype());
  mechanism::CheckContiguousRows(kOp, "y", y);
  ShiftedRowsCall call;
  call.in = in;
  call.y = y;
  Run(ctx, call);
}

void ShiftedRowsBackward(Context& ctx, const ShiftedRows& in, const ConstTensorView& dy,
                         const ShiftedRowsGradients& out) {
  const os::ScopedFloatControl float_control;
  mechanism::Apart apart = CheckedInputs(in);
  CheckTensor(kOp, "dy", dy, ShapeOfResult(in), in.x.dtype(), true);
  mechanism::CheckContiguousRows(kOp, "dy", dy);
  apart.Reads("dy", dy);
  for (const auto& [name, view, of] :
       {std::tuple{"dx", out.dx, in.x}, {"dfirst", out.dfirst, in.first}, {"dmix", out.dmix, in.mix}}) {
    if (!view.present()) continue;
    if (!of.present()) Fail(kOp, name, "is asked for", "its tensor with it");
    apart.Writes(kOp, name, view, of.sizes(), of.dtype());
    mechanism::CheckContiguousRows(kOp, name, view);
  }
  ShiftedRowsCall call;
  call.in = in;
  call.dy = dy;
  call.out = out;
  Run(ctx, call);
}

}  // namespace heed::layers
