// Gated rows: checks, tasks, and the sum over tasks for the gradient of a weight.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "heed/core/os.h"
#include "heed/layers/gated_rows_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::layers {
namespace {

using mechanism::Fail;

constexpr char kOp[] = "gated_rows";

mechanism::Apart CheckedInputs(const GatedRows& in, const ConstTensorView& dy) {
  const bool has_x = in.x.present();
  const ConstTensorView& like = has_x ? in.x : in.gate;
  mechanism::CheckFloat(kOp, has_x ? "x" : "gate", like);
  if (like.rank() == 0) Fail(kOp, has_x ? "x" : "gate", "has shape []", "[..., N]");
  if (!has_x && in.norm != RowNorm::kNone) Fail(kOp, "x", "is absent", "a tensor beside a norm");
  if (in.weight.present()) {
    if (in.norm == RowNorm::kNone) Fail(kOp, "weight", "is given without a norm", "none");
    const int rank = in.weight.rank();
    if (rank != 1 && (rank != 2 || like.rank() < 2)) {
      Fail(kOp, "weight", "has shape " + in.weight.ShapeString(), "[N] or [H, N]");
    }
    const auto shape = like.sizes().last(static_cast<size_t>(rank));
    mechanism::CheckTensor(kOp, "weight", in.weight, shape, like.dtype(), true);
    mechanism::CheckContiguousRows(kOp, "weight", in.weight);
  }
  if (!(in.eps >= 0)) Fail(kOp, "eps", "is " + mechanism::Text(in.eps), "at least 0");
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::tuple{"x", in.x}, {"gate", in.gate}, {"dy", dy}}) {
    if (!view.present()) continue;
    mechanism::CheckTensor(kOp, name, view, like.sizes(), like.dtype(), true);
    mechanism::CheckContiguousRows(kOp, name, view);
  }
  for (const auto& [name, view] : {std::tuple{"x", in.x}, {"gate", in.gate}, {"weight", in.weight}, {"dy", dy}}) {
    apart.Reads(name, view);
  }
  return apart;
}

void CheckOutput(mechanism::Apart& apart, const char* name, const TensorView& t, const ConstTensorView& like) {
  apart.Writes(kOp, name, t, like.sizes(), like.dtype());
  mechanism::CheckContiguousRows(kOp, name, t);
}

// The tensor with its last two axes as one.
template <class View>
void Merge(View& t) {
  if (!t.present()) return;
  const int rank = t.rank();
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end() - 1),
      strides(t.strides().begin(), t.strides().end() - 1);
  sizes.back() *= t.size(rank - 1);
  strides.back() = 1;
  t = View(t.data(), t.dtype(), sizes, strides);
}

bool IsMergeable(const ConstTensorView& t) {
  if (!t.present()) return true;
  const int rank = t.rank();
  return t.size(rank - 2) == 1 || t.stride(rank - 2) == t.size(rank - 1);
}

// Without a norm, rows that follow each other in memory are one row.
void MergeRows(GatedRowsCall& c) {
  const auto mergeable = [&] {
    return c.like().rank() > 1 && IsMergeable(c.in.x) && IsMergeable(c.in.gate) && IsMergeable(c.dy) &&
           IsMergeable(c.y) && IsMergeable(c.out.dx) && IsMergeable(c.out.dgate);
  };
  while (mergeable()) {
    Merge(c.in.x);
    Merge(c.in.gate);
    Merge(c.dy);
    Merge(c.y);
    Merge(c.out.dx);
    Merge(c.out.dgate);
  }
}

template <class T>
void SumPartials(const T* partials, int64_t tasks, const TensorView& dweight) {
  const int64_t elements = dweight.num_elements(), width = dweight.size(dweight.rank() - 1);
  for (int64_t i = 0; i < elements; ++i) {
    double sum = 0;
    for (int64_t task = 0; task < tasks; ++task) sum += static_cast<double>(partials[task * elements + i]);
    const int64_t row = dweight.rank() == 2 ? i / width * dweight.stride(0) : 0;
    StoreDouble(dweight.dtype(), dweight.data(), row + i % width * dweight.stride(dweight.rank() - 1), sum);
  }
}

void Run(Context& ctx, GatedRowsCall& c, const TensorView& dweight) {
  const bool has_norm = c.in.norm != RowNorm::kNone;
  if (!has_norm) MergeRows(c);
  const ConstTensorView& like = c.like();
  const int64_t width = like.size(like.rank() - 1);
  const int64_t rows = width == 0 ? 0 : like.num_elements() / width;
  c.columns = has_norm ? width : 4096;
  c.units_of_row = width == 0 ? 0 : (width + c.columns - 1) / c.columns;
  // A task is worth its start, and few tasks have sums of their own.
  constexpr int64_t kElements = 16384, kMostTasks = 64;
  const int64_t units = rows * c.units_of_row, least = kElements / std::max<int64_t>(1, std::min(width, c.columns));
  int64_t units_of_task = std::max<int64_t>(1, least);
  if (dweight.present()) units_of_task = std::max(units_of_task, (units + kMostTasks - 1) / kMostTasks);
  const int64_t tasks = (units + units_of_task - 1) / units_of_task;
  const bool is_f64 = like.dtype() == DType::kF64;
  if (dweight.present()) {
    const int64_t bytes = tasks * dweight.num_elements() * (is_f64 ? 8 : 4);
    ctx.ReserveShared(bytes);
    c.partials = ctx.Shared();
    if (bytes > 0) std::memset(c.partials, 0, static_cast<size_t>(bytes));
  }
  const GatedRowsKernel kernel = GatedRowsKernelFor(ctx);
  ctx.ParallelFor(tasks, [&](int64_t task, int) {
    const int64_t begin = task * units_of_task;
    kernel(c, task, begin, std::min(units, begin + units_of_task));
  });
  if (!dweight.present()) return;
  if (is_f64) {
    SumPartials(static_cast<const double*>(c.partials), tasks, dweight);
  } else {
    SumPartials(static_cast<const float*>(c.partials), tasks, dweight);
  }
}

}  // namespace

void GatedRowsForward(Context& ctx, const GatedRows& in, const TensorView& y) {
  const os::ScopedFloatControl float_control;
  mechanism::Apart apart = CheckedInputs(in, {});
  GatedRowsCall call;
  call.in = in;
  call.y = y;
  CheckOutput(apart, "y", y, call.like());
  Run(ctx, call, {});
}

void GatedRowsBackward(Context& ctx, const GatedRows& in, const ConstTensorView& dy, const GatedRowsGradients& out) {
  const os::ScopedFloatControl float_control;
  if (!dy.present()) Fail(kOp, "dy", "is absent", "a tensor");
  mechanism::Apart apart = CheckedInputs(in, dy);
  for (const auto& [name, view, of] : {std::tuple{"dx", out.dx, in.x}, {"dgate", out.dgate, in.gate}}) {
    if (!view.present()) continue;
    if (!of.present()) Fail(kOp, name, "is asked for", "its tensor with it");
    CheckOutput(apart, name, view, of);
  }
  if (out.dweight.present()) {
    if (!in.weight.present()) Fail(kOp, "dweight", "is asked for", "weight with it");
    apart.Writes(kOp, "dweight", out.dweight, in.weight.sizes(), in.weight.dtype());
  }
  GatedRowsCall call;
  call.in = in;
  call.dy = dy;
  call.out.dx = out.dx;
  call.out.dgate = out.dgate;
  Run(ctx, call, out.dweight);
}

}  // namespace heed::layers
