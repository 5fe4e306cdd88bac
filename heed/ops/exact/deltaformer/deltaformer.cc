// DeltaFormer: the checks of a call, its tokens outside sequences, and its softmaxes on the softmax engine.
#include "heed/ops/exact/deltaformer/deltaformer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/problem.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/exact/common/token_blocks_internal.h"
#include "heed/ops/exact/deltaformer/deltaformer_internal.h"

namespace heed::deltaformer {
namespace {

using mechanism::Axes;
using mechanism::CheckContiguousRows;
using mechanism::CheckTensor;
using mechanism::Fail;

DType DTypeOf(const TensorView& t, DType dtype, bool wide) {
  return wide && t.dtype() == DType::kF64 ? DType::kF64 : dtype;
}

// Checks that it is a float [B, T, heads, channels] with contiguous rows, and neither heads nor channels are 0.
void CheckRows(const char* op, const char* name, const ConstTensorView& t, const char* shape, bool data = true) {
  mechanism::CheckFloat(op, name, t, data);
  if (t.rank() != 4) Fail(op, name, "has shape " + t.ShapeString(), shape);
  for (const int axis : {2, 3}) {
    if (t.size(axis) < 1) {
      Fail(op, name, "has shape " + t.ShapeString(), axis == 2 ? "at least one head" : "at least one channel");
    }
  }
}

// Checks what both kinds of calls have and call.T keys, T - first of whose tokens have values.
void CheckValueInputs(const char* op, const ValueInputs& in, std::optional<double> scale, DType dtype, Call& call,
                      mechanism::Apart& apart, bool data = true) {
  const int64_t N = call.T - call.first;
  const Axes of_queries = {call.B, N, call.Hkv, call.D};
  CheckTensor(op, "k", in.k, {call.B, call.T, call.Hkv, call.D}, dtype, data);
  CheckTensor(op, "v", in.v, {call.B, N, call.Hkv, call.Dv}, dtype, data);
  if (in.w.present()) CheckTensor(op, "w", in.w, of_queries, dtype, data);
  call.w = in.w.present() ? in.w : in.k.Slice(1, call.first, call.T);
  for (const auto& [name, view] : {std::pair{"k", in.k}, {"v", in.v}, {"w", call.w}}) {
    CheckContiguousRows(op, name, view);
  }
  if (in.beta.present()) {
    const DType wide = mechanism::StateDType(dtype);
    CheckTensor(op, "beta", in.beta, {call.B, N, call.Hkv}, in.beta.dtype() == wide ? wide : dtype, data);
  }
  call.scale = scale.value_or(1 / std::sqrt(static_cast<double>(call.D)));
  if (!std::isfinite(call.scale)) Fail(op, "scale", "is " + mechanism::Text(call.scale), "a finite number");
  for (const auto& [name, view] : {std::pair{"k", in.k}, {"v", in.v}, {"beta", in.beta}, {"w", in.w}}) {
    apart.Reads(name, view);
  }
}

// Checks the inputs and options, and adds them to `apart`. Without `data`, pointers may be null.
Call CheckedInputs(const char* op, const Inputs& in, const Options& options, mechanism::Apart& apart,
                   bool data = true) {
  CheckRows(op, "q", in.q, "[B, T, H, D]", data);
  CheckRows(op, "k", in.k, "[B, T, Hkv, D]", data);
  CheckRows(op, "v", in.v, "[B, T, Hkv, Dv]", data);
  Call call;
  call.B = in.q.size(0);
  call.T = in.q.size(1);
  call.H = in.q.size(2);
  call.D = in.q.size(3);
  call.Hkv = in.k.size(2);
  call.Dv = in.v.size(3);
  if (call.H % call.Hkv != 0) {
    Fail(op, "q", "has " + std::to_string(call.H) + " heads",
         "a multiple of the " + std::to_string(call.Hkv) + " of k");
  }
  CheckTensor(op, "q", in.q, {call.B, call.T, call.H, call.D}, in.q.dtype(), data);
  CheckContiguousRows(op, "q", in.q);
  CheckValueInputs(op, ValuesOf(in), options.scale, in.q.dtype(), call, apart, data);
  call.sequences = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"lengths", options.lengths},
                                   {"starts", options.starts},
                                   {"cu_seqlens", options.cu_seqlens}}) {
    apart.Reads(name, view);
  }
  return call;
}

// The engine's views of [B, T, heads, channels], and of [B, heads, T].
softmax::Rows RowsOf(const ConstTensorView& t) { return {t.data(), t.stride(0), t.stride(1), t.stride(2)}; }
softmax::Rows SumsOf(const ConstTensorView& t) { return {t.data(), t.stride(0), t.stride(2), t.stride(1)}; }

// Attention of `queries` to k and u, without outputs. Token i sees keys up to itself, or with `strict` those before it.
softmax::Problem ProblemOf(const Call& call, const ConstTensorView& queries, const ConstTensorView& k,
                           const ConstTensorView& u, bool strict) {
  softmax::Problem p;
  p.dtype = queries.dtype();
  p.query_heads = queries.size(2);
  p.key_heads = call.Hkv;
  p.depth = call.D;
  p.value_depth = call.Dv;
  p.scale = call.scale;
  p.causal = true;
  p.q = RowsOf(queries);
  p.k = RowsOf(k);
  p.v = RowsOf(u);
  for (const mechanism::TokenRange& range : call.sequences) {
    const int64_t tokens = range.end - range.begin;
    softmax::Sequence s;
    s.batch = range.batch;
    s.first_q = s.first_k = range.begin;
    s.num_queries = s.query_end = s.num_keys = s.key_end = tokens;
    s.start = strict ? -1 : 0;
    if (tokens > 0) p.sequences.push_back(s);
  }
  return p;
}

// Lays out the tables of a backward pass whose gradients are `out`.
int64_t LayOut(const Call& call, DType dtype, const Gradients& out, void* base, Tables& tables) {
  Carver carver(base);
  const DType wide = mechanism::StateDType(dtype);
  const auto table = [&](const Axes& sizes) {
    const TensorView counted(nullptr, wide, sizes);
    char* data;
    carver.Next(data, counted.num_elements() * static_cast<int64_t>(SizeOf(wide)));
    return TensorView(data, wide, sizes);
  };
  if (out.dk.present() || out.dv.present() || out.dbeta.present() || out.dw.present()) {
    tables.r = table({call.B, call.T, call.Hkv, call.Dv});
    tables.du = table({call.B, call.T, call.Hkv, call.Dv});
    tables.lse_w = table({call.B, call.Hkv, call.T});
  }
  if (out.dk.present()) tables.dk = table({call.B, call.T, call.Hkv, call.D});
  if (out.dq.present() && wide != dtype) tables.dq = table({call.B, call.T, call.H, call.D});
  return carver.bytes();
}

// The gradients of the second softmax.
softmax::Gradients SecondGradients(const BackwardInputs& in, const Tables& tables, const Gradients& out) {
  softmax::Gradients g;
  g.wide = true;
  g.d_o = RowsOf(in.d_o);
  if (in.d_lse.present()) g.d_lse = SumsOf(in.d_lse);
  if (out.dq.present()) g.dq = RowsOf(tables.dq.present() ? tables.dq : out.dq);
  if (tables.dk.present()) g.dk = RowsOf(tables.dk);
  if (tables.du.present()) g.dv = RowsOf(tables.du);
  return g;
}

// Checks a call that is only planned.
Call Planned(const char* op, const Inputs& in, const Options& options) {
  mechanism::Apart apart;
  return CheckedInputs(op, in, options, apart, false);
}

// Views of u, and of everything else that is only planned: the address is never read.
alignas(64) char nowhere[64];
TensorView Nowhere(DType dtype, const ConstTensorView& like) { return {nowhere, dtype, like.sizes()}; }

mechanism::Reservation ForwardMemory(const char* op, const Context& ctx, const Call& call, const Inputs& in) {
  const softmax::Problem p = ProblemOf(call, in.q, in.k, Nowhere(in.q.dtype(), in.v), false);
  const mechanism::Reservation second = {.per_thread = softmax::Choose(op, ctx, p).workspace(ctx, p)};
  return mechanism::Larger(ValuesMemory(ctx, call, in.q.dtype()), second);
}

}  // namespace

Call CheckForward(const char* op, const Inputs& in, const Options& options, const Outputs& out, bool wide) {
  mechanism::Apart apart;
  const Call call = CheckedInputs(op, in, options, apart);
  apart.Writes(op, "o", out.o, {call.B, call.T, call.H, call.Dv}, DTypeOf(out.o, in.q.dtype(), wide));
  apart.Writes(op, "u", out.u, {call.B, call.T, call.Hkv, call.Dv}, DTypeOf(out.u, in.q.dtype(), wide));
  CheckContiguousRows(op, "o", out.o);
  CheckContiguousRows(op, "u", out.u);
  if (out.lse.present()) {
    apart.Writes(op, "lse", out.lse, {call.B, call.H, call.T},
                 DTypeOf(out.lse, mechanism::StateDType(in.q.dtype()), wide));
  }
  return call;
}

Call CheckBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, bool wide) {
  mechanism::Apart apart;
  const Call call = CheckedInputs(op, in, options, apart);
  const DType dtype = in.q.dtype(), of_lse = mechanism::StateDType(dtype);
  const Axes of_o = {call.B, call.T, call.H, call.Dv}, of_u = {call.B, call.T, call.Hkv, call.Dv},
             sums = {call.B, call.H, call.T};
  const auto rows = [&](const char* name, const ConstTensorView& t, const Axes& shape) {
    CheckTensor(op, name, t, shape, dtype, true);
    CheckContiguousRows(op, name, t);
    apart.Reads(name, t);
  };
  rows("d_o", in.d_o, of_o);
  rows("u", in.u, of_u);
  if (in.d_u.present()) rows("d_u", in.d_u, of_u);
  if (!wide) {  // the reference does not read these
    rows("o", in.o, of_o);
    CheckTensor(op, "lse", in.lse, sums, of_lse, true);
    apart.Reads("lse", in.lse);
  }
  if (in.d_lse.present()) CheckTensor(op, "d_lse", in.d_lse, sums, of_lse, true);
  apart.Reads("d_lse", in.d_lse);
  for (const auto& [name, gradient, of] : {std::tuple{"dq", out.dq, in.q},
                                           {"dk", out.dk, in.k},
                                           {"dv", out.dv, in.v},
                                           {"dbeta", out.dbeta, in.beta},
                                           {"dw", out.dw, in.w}}) {
    if (!gradient.present()) continue;
    if (!of.present()) Fail(op, name, "is asked for", "none: there is no such input");
    apart.Writes(op, name, gradient, of.sizes(), DTypeOf(gradient, of.dtype(), wide));
    if (of.rank() == 4) CheckContiguousRows(op, name, gradient);
  }
  return call;
}

Call CheckValues(const char* op, const ValueInputs& in, std::optional<double> scale, const TensorView& u, bool wide) {
  CheckRows(op, "k", in.k, "[B, Tk, Hkv, D]");
  CheckRows(op, "v", in.v, "[B, N, Hkv, Dv]");
  Call call;
  call.B = in.k.size(0);
  call.T = in.k.size(1);
  call.H = call.Hkv = in.k.size(2);
  call.D = in.k.size(3);
  call.Dv = in.v.size(3);
  call.first = call.T - in.v.size(1);
  if (call.first < 0) {
    Fail(op, "v", "has " + std::to_string(in.v.size(1)) + " tokens", "at most the " + std::to_string(call.T) + " of k");
  }
  mechanism::Apart apart;
  CheckValueInputs(op, in, scale, in.k.dtype(), call, apart);
  apart.Writes(op, "u", u, {call.B, call.T, call.Hkv, call.Dv}, DTypeOf(u, in.k.dtype(), wide));
  CheckContiguousRows(op, "u", u);
  for (int64_t b = 0; b < call.B; ++b) call.sequences.push_back({b, 0, call.T});
  return call;
}

void ClearExcluded(const Call& call, const Outputs& out) {
  for (const TensorView* t : {&out.o, &out.u}) mechanism::ClearOthers(call.sequences, *t);
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
  for (const TensorView* t : {&out.dq, &out.dk, &out.dv, &out.dbeta, &out.dw}) {
    mechanism::ClearOthers(call.sequences, *t);
  }
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "deltaformer::Forward";
  const os::ScopedFloatControl float_control;
  const Call call = CheckForward(kOp, in, options, out, false);
  ComputeValues(ctx, call, ValuesOf(in), out.u);
  softmax::Problem p = ProblemOf(call, in.q, in.k, out.u, false);
  p.o = RowsOf(out.o);
  if (out.lse.present()) p.lse = SumsOf(out.lse);
  softmax::Choose(kOp, ctx, p).forward(ctx, p);
  ClearExcluded(call, out);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "deltaformer::Backward";
  const os::ScopedFloatControl float_control;
  const Call call = CheckBackward(kOp, in, options, out, false);
  Tables tables;
  ctx.ReserveStaging(LayOut(call, in.q.dtype(), out, nullptr, tables));
  LayOut(call, in.q.dtype(), out, ctx.Staging(), tables);

  softmax::Problem second = ProblemOf(call, in.q, in.k, in.u, false);
  second.o = RowsOf(in.o);
  second.lse = SumsOf(in.lse);
  softmax::Choose(kOp, ctx, second, softmax::Pass::kBackward).backward(ctx, second, SecondGradients(in, tables, out));

  if (tables.du.present()) {
    softmax::Problem first = ProblemOf(call, call.w, in.k, in.u, true);
    first.o = RowsOf(tables.r);
    first.lse = SumsOf(tables.lse_w);
    first.wide_outputs = true;
    softmax::Choose(kOp, ctx, first).forward(ctx, first);
  }
  ComputeBackward(ctx, call, in, tables, out);
  ClearExcluded(call, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "deltaformer::Workspace";
  return ForwardMemory(kOp, ctx, Planned(kOp, in, options), in).bytes(ctx);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "deltaformer::BackwardWorkspace";
  const Call call = Planned(kOp, in, options);
  const DType dtype = in.q.dtype();
  Gradients all;
  all.dq = Nowhere(dtype, in.q);
  all.dk = Nowhere(dtype, in.k);
  all.dv = Nowhere(dtype, in.v);
  Tables tables;
  mechanism::Reservation memory = GradientsMemory(ctx, call, dtype, true);
  memory.staging = LayOut(call, dtype, all, nowhere, tables);
  BackwardInputs planned;
  planned.d_o = Nowhere(dtype, in.q);
  const TensorView u = Nowhere(dtype, in.v);
  const softmax::Problem second = ProblemOf(call, in.q, in.k, u, false), first = ProblemOf(call, call.w, in.k, u, true);
  const softmax::BackwardBytes of_second = softmax::Choose(kOp, ctx, second, softmax::Pass::kBackward)
                                               .backward_workspace(ctx, second, SecondGradients(planned, tables, all));
  memory = mechanism::Larger(memory, {.per_thread = of_second.per_thread, .shared = of_second.shared});
  return mechanism::Larger(memory, {.per_thread = softmax::Choose(kOp, ctx, first).workspace(ctx, first)}).bytes(ctx);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "deltaformer::Explain";
  const Call call = Planned(kOp, in, options);
  const softmax::Problem p = ProblemOf(call, in.q, in.k, Nowhere(in.q.dtype(), in.v), false);
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, p);
  Explanation e;
  e.kernel = std::string("deltaformer on ") + kernel.name;
  e.target = kernel.target(ctx);
  e.why = std::string("u in blocks of 64 tokens, which follow each other; then a call of attention: ") + kernel.why;
  const double channels = static_cast<double>(call.D + call.Dv);
  e.flops = 2 * channels * static_cast<double>(call.H + call.Hkv) * mechanism::CausalPairs(call.sequences);
  e.visited_pairs = static_cast<double>(call.Hkv) * token_blocks::VisitedPairs(call.sequences) +
                    softmax::VisitedPairs(p, kernel.lanes(ctx, p), kernel.grid);
  e.bytes = mechanism::Bytes(Nowhere(in.q.dtype(), in.v));  // of u, written once and read once, and of o
  e.bytes +=
      e.bytes + static_cast<double>(call.B * call.T * call.H * call.Dv) * static_cast<double>(SizeOf(in.q.dtype()));
  for (const ConstTensorView* t : {&in.q, &in.k, &in.v, &in.beta, &in.w}) e.bytes += mechanism::Bytes(*t);
  e.workspace_bytes = ForwardMemory(kOp, ctx, call, in).bytes(ctx);
  return e;
}

void Values(Context& ctx, const ValueInputs& in, std::optional<double> scale, const TensorView& u) {
  const os::ScopedFloatControl float_control;
  const Call call = CheckValues("deltaformer::Values", in, scale, u, false);
  if (call.first < call.T) ComputeValues(ctx, call, in, u);
}

}  // namespace heed::deltaformer
