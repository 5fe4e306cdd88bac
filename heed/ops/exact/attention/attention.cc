// Forward and Merge on the softmax engine: check, choose a kernel, run. Merge is the only arithmetic here.
#include "heed/ops/exact/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_options_internal.h"

namespace heed::attention {

void FillSurplusRows(const softmax::Problem& p, const ConstTensorView& q, const Outputs& out) {
  const int64_t Tq = q.size(q.rank() - 3);
  int64_t used = 0;
  for (const softmax::Sequence& s : p.sequences) {
    used = std::max(used, s.first_q + s.num_queries);
  }
  for (int64_t t = used; t < Tq; ++t) {
    for (int64_t h = 0; h < p.query_heads; ++h) {
      const int64_t row = t * p.o.token_stride + h * p.o.head_stride;
      for (int64_t e = 0; e < p.value_depth; ++e) {
        StoreDouble(out.o.dtype(), out.o.data(), row + e, 0);
      }
      if (out.lse.present()) {
        StoreDouble(out.lse.dtype(), out.lse.data(), t * p.lse.token_stride + h * p.lse.head_stride,
                    -std::numeric_limits<double>::infinity());
      }
    }
  }
}

Device DeviceOf(const ConstTensorView& q) { return q.device().type == DeviceType::kCuda ? q.device() : Device(); }

namespace {

void AddSurplusRows(const ConstTensorView& q, int64_t num_keys, softmax::Problem* p) {
  softmax::Sequence surplus;
  for (const softmax::Sequence& s : p->sequences) {
    surplus.first_q = std::max(surplus.first_q, s.first_q + s.num_queries);
    surplus.first_k = std::max(surplus.first_k, s.first_k + s.num_keys);
  }
  surplus.num_queries = q.size(q.rank() - 3) - surplus.first_q;
  surplus.num_keys = num_keys - surplus.first_k;
  p->sequences.push_back(surplus);
}

double NumBytes(const ConstTensorView& t) {
  return static_cast<double>(t.num_elements()) * static_cast<double>(SizeOf(t.dtype()));
}

// Bytes of the tensors with an element per key and head; other tensors are small.
double NumBytes(const Options& options) {
  double bytes = 0;
  ForEachTensor(options, [&](const OptionRow& row, const ConstTensorView& view) {
    if (row.Has('H') && row.Has('K')) bytes += NumBytes(view);
  });
  return bytes;
}

}  // namespace

const softmax::Kernel& ForDevice(const char* op, const Context& ctx, const Options& options, const ConstTensorView& q,
                                 int64_t num_keys, bool to_lengths, softmax::Problem* p, softmax::Pass pass) {
  const softmax::Kernel& kernel = softmax::Choose(op, ctx, *p, pass);
  PlacePattern(op, options.pattern, to_lengths, p);
  if (options.cu_seqlens_q.present()) AddSurplusRows(q, num_keys, p);
  return kernel;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "attention::Forward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  softmax::Problem p = CheckedProblem(kOp, in, options, out, Use::kForward, DeviceOf(in.q));
  if (p.device.type != DeviceType::kCpu) {
    return ForDevice(kOp, ctx, options, in.q, in.k.size(in.k.rank() - 3), /*to_lengths=*/false, &p).forward(ctx, p);
  }
  RefuseSlowPairs(kOp, ctx, p);
  SumLogDecays(kOp, ctx, &p);
  Run(kOp, ctx, options, &p);
  if (options.cu_seqlens_q.present()) FillSurplusRows(p, in.q, out);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "attention::Workspace";
  const softmax::Problem p = CheckedProblem(kOp, in, options, {}, Use::kExplain, DeviceOf(in.q));
  return BytesOf(kOp, ctx, p, options);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "attention::Explain";
  const softmax::Problem p = CheckedProblem(kOp, in, options, {}, Use::kExplain, DeviceOf(in.q));
  const std::vector<Layer> layers = LayersOf(p, options);
  const bool by_residue = layers.back().kind == Layer::kResidues, by_row = layers.back().kind == Layer::kRows;
  std::vector<Subproblem> subproblems;
  for (const Layer& layer : layers) {
    for (Subproblem& subproblem : SubproblemsOf(kOp, p, options, layer)) subproblems.push_back(std::move(subproblem));
  }
  if (p.device.type != DeviceType::kCpu) {
    for (Subproblem& subproblem : subproblems) subproblem.problem.mask.data = nullptr;  // not read by this function
  }
  const bool own_kernel = !subproblems.empty() && (by_row || subproblems[0].problem.gathers());
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, own_kernel ? subproblems[0].problem : p);
  const double rows = static_cast<double>(in.q.num_elements()) / static_cast<double>(p.depth);
  Explanation e = {};
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = Why(kernel, p);
  if (by_residue) e.why += "; positions that the pattern keeps apart, by residue, are dense problems";
  if (!subproblems.empty() && subproblems[0].problem.gathers())
    e.why += "; rows that keep the same tile are computed together";
  if (by_row) e.why += "; each row is a problem of its own, of the keys that the pattern lists for it";
  for (const Subproblem& subproblem : subproblems) {
    e.flops += 2 * static_cast<double>(p.depth + p.value_depth) * softmax::KeptPairs(subproblem.problem);
    e.visited_pairs += softmax::VisitedPairs(subproblem.problem, kernel.lanes(ctx, subproblem.problem), kernel.grid);
  }
  e.workspace_bytes = BytesOf(kOp, ctx, p, options);
  e.bytes = NumBytes(in.q) + NumBytes(in.k) + NumBytes(in.v) + NumBytes(options) +
            rows * static_cast<double>(p.value_depth) * static_cast<double>(SizeOf(in.q.dtype()));
  e.invariant = kernel.invariant && !by_residue && !by_row;
  return e;
}

namespace {

// Checks the parts of a merge, the sinks and the outputs.
void CheckParts(std::span<const Part> parts, const ConstTensorView& sinks, const Outputs& out) {
  const auto fail = [&](const std::string& name, const std::string& got, const std::string& expected) {
    throw InvalidArgument("attention::Merge: " + name + " " + got + ", expected " + expected);
  };
  const auto check = [&](const std::string& name, const ConstTensorView& t, std::span<const int64_t> shape) {
    if (!t.present()) fail(name, "is absent", "a tensor");
    if (!IsFloat(t.dtype())) fail(name, std::string("has dtype ") + Name(t.dtype()), "a float dtype");
    if (!std::ranges::equal(t.sizes(), shape)) fail(name, "has shape " + t.ShapeString(), ShapeString(shape));
    if (t.device().type != DeviceType::kCpu) fail(name, "is on a device", "the CPU");
    if (t.num_elements() > 0 && t.data() == nullptr) fail(name, "has no data", "a pointer");
  };
  if (parts.empty()) fail("parts", "is empty", "at least one part");
  const ConstTensorView& first = parts[0].o;
  const int rank = first.rank();
  if (!first.present() || (rank != 4 && rank != 3)) {
    fail("parts[0].o", "has shape " + first.ShapeString(), "[B, T, H, D], or [T, H, D] packed");
  }
  const int64_t T = first.size(rank - 3), H = first.size(rank - 2);
  std::vector<int64_t> lse_shape = {H, T};
  if (rank == 4) lse_shape.insert(lse_shape.begin(), first.size(0));
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = "parts[" + std::to_string(i) + "].";
    check(name + "o", parts[i].o, first.sizes());
    check(name + "lse", parts[i].lse, lse_shape);
  }
  if (sinks.present()) check("sinks", sinks, std::span(&H, 1));
  check("o", out.o, first.sizes());
  if (out.lse.present()) check("lse", out.lse, lse_shape);
  for (const auto& [name, written] : {std::pair{"o", ConstTensorView(out.o)}, {"lse", ConstTensorView(out.lse)}}) {
    if (written.present() && SelfOverlaps(written)) {
      fail(name, "has strides " + ShapeString(written.strides()), "strides that reach every element once");
    }
    for (const Part& part : parts) {
      if (Overlap(written, part.o) || Overlap(written, part.lse) || Overlap(written, sinks)) {
        fail(name, "overlaps an input", "memory of its own");
      }
    }
  }
  if (Overlap(out.o, out.lse)) fail("lse", "overlaps o", "memory of its own");
}

// Offset of row i of head h of sequence b in an o, [B, T, H, D] or packed, and in an lse, [B, H, T] or packed.
int64_t RowOfO(const ConstTensorView& t, int64_t b, int64_t i, int64_t h) {
  const int r = t.rank();
  return (r == 4 ? b * t.stride(0) : 0) + i * t.stride(r - 3) + h * t.stride(r - 2);
}
int64_t RowOfLse(const ConstTensorView& t, int64_t b, int64_t i, int64_t h) {
  const int r = t.rank();
  return (r == 3 ? b * t.stride(0) : 0) + h * t.stride(r - 2) + i * t.stride(r - 1);
}

// Merges one row; `weights` has one element per part.
void MergeRow(std::span<const Part> parts, const ConstTensorView& sinks, const Outputs& out, int64_t b, int64_t i,
              int64_t h, double* weights) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  double max = kNone;
  for (size_t s = 0; s < parts.size(); ++s) {
    const ConstTensorView& lse = parts[s].lse;
    weights[s] = LoadAsDouble(lse.dtype(), lse.data(), RowOfLse(lse, b, i, h));
    if (weights[s] > max || std::isnan(weights[s])) max = weights[s];
    if (std::isnan(max)) break;
  }
  double total = 0;
  for (size_t s = 0; s < parts.size(); ++s) {
    weights[s] = std::isnan(max) ? max : weights[s] == kNone ? 0 : std::exp(weights[s] - max);
    total += weights[s];
  }
  const double merged = total == 0 ? kNone : max + std::log(total);
  double factor = total == 0 ? 0 : 1 / total;
  if (sinks.present() && total != 0) {
    factor /= 1 + std::exp(LoadAsDouble(sinks.dtype(), sinks.data(), h * sinks.stride(0)) - merged);
  }
  const int last = out.o.rank() - 1;
  const int64_t row = RowOfO(out.o, b, i, h);
  for (int64_t e = 0; e < out.o.size(last); ++e) {
    double sum = 0;
    for (size_t s = 0; s < parts.size(); ++s) {
      if (weights[s] == 0) continue;  // no key, or an underflowed weight
      const ConstTensorView& o = parts[s].o;
      sum += weights[s] * LoadAsDouble(o.dtype(), o.data(), RowOfO(o, b, i, h) + e * o.stride(last));
    }
    StoreDouble(out.o.dtype(), out.o.data(), row + e * out.o.stride(last), sum * factor);
  }
  if (out.lse.present()) StoreDouble(out.lse.dtype(), out.lse.data(), RowOfLse(out.lse, b, i, h), merged);
}

}  // namespace

void Merge(Context& ctx, std::span<const Part> parts, const ConstTensorView& sinks, const Outputs& out) {
  CheckParts(parts, sinks, out);
  const ConstTensorView& first = parts[0].o;
  const int rank = first.rank();
  const int64_t B = rank == 4 ? first.size(0) : 1, T = first.size(rank - 3), H = first.size(rank - 2);
  ctx.ReserveScratch(std::ssize(parts) * int64_t{sizeof(double)});
  ctx.ParallelFor(B * T, [&](int64_t task, int worker) {
    double* const weights = static_cast<double*>(ctx.Scratch(worker));
    for (int64_t h = 0; h < H; ++h) MergeRow(parts, sinks, out, task / T, task % T, h, weights);
  });
}

}  // namespace heed::attention
