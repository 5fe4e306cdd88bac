// Compressed attention as two calls of attention, over the window and over compressed keys, that share one denominator.
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "heed/core/os.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention_internal.h"

namespace heed::compressed_attention {
namespace {

using attention::Use;
using softmax::Problem;

double Wide(double x) { return x; }
float Wide(float x) { return x; }
float Wide(BF16 x) { return ToFloat(x); }
float Wide(F16 x) { return ToFloat(x); }

void StoreRounded(double x, double* to) { *to = x; }
void StoreRounded(float x, float* to) { *to = x; }
void StoreRounded(float x, BF16* to) { *to = ToBF16(x); }
void StoreRounded(float x, F16* to) { *to = ToF16(x); }

// Calls f(row of a, row of b) for each token and head of [B, T, H, D]; an absent b has null rows.
template <class S, class F>
void ForRows(Context& ctx, const TensorView& a, const ConstTensorView& b, const F& f) {
  const int64_t tokens = a.size(1), heads = a.size(2);
  ctx.ParallelFor(a.size(0) * tokens, [&](int64_t task, int) {
    const int64_t batch = task / tokens, i = task % tokens;
    for (int64_t h = 0; h < heads; ++h) {
      const auto at = [&](const auto& t) { return batch * t.stride(0) + i * t.stride(1) + h * t.stride(2); };
      f(a.as<S>() + at(a), b.present() ? b.as<S>() + at(b) : nullptr);
    }
  });
}

template <class F>
void WithStorage(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF64: return f(double());
    case DType::kBF16: return f(BF16());
    case DType::kF16: return f(F16());
    default: return f(float());
  }
}

// to += term, rounded once.
void Add(Context& ctx, const ConstTensorView& term, const TensorView& to) {
  WithStorage(to.dtype(), [&](auto stored) {
    using S = decltype(stored);
    ForRows<S>(ctx, to, term, [depth = to.size(3)](S* sum, const S* other) {
      for (int64_t e = 0; e < depth; ++e) StoreRounded(Wide(sum[e]) + Wide(other[e]), sum + e);
    });
  });
}

void Clear(Context& ctx, const TensorView& t) {
  if (!t.present()) return;
  WithStorage(t.dtype(), [&](auto stored) {
    using S = decltype(stored);
    ForRows<S>(ctx, t, {}, [depth = t.size(3)](S* row, const S*) {
      std::memset(static_cast<void*>(row), 0, static_cast<size_t>(depth) * sizeof(S));
    });
  });
}

// The gradients of each part; dsinks, which depends on whole rows, belongs to the first part. dq_compressed is where
// the compressed part writes dq.
attention::Gradients GradientsOf(const Call& c, const Gradients& out, const TensorView& dq_compressed, int64_t part) {
  attention::Gradients g;
  if (part == kWindow) {
    if (!c.has_window) return g;
    g.dq = out.dq;
    g.dk = out.dk;
    g.dv = out.dv;
  } else {
    g.dq = dq_compressed;
    g.dk = out.dk_cmp;
    g.dv = out.dv_cmp;
  }
  if (part == (c.has_window ? kWindow : kCompressed)) g.dsinks = out.dsinks;
  return g;
}

bool IsWanted(const attention::Gradients& g) {
  return g.dq.present() || g.dk.present() || g.dv.present() || g.dsinks.present();
}

// Runs the backward pass of a part. Rows are summed by blocks, which begin with a sequence's first row, so that its
// bits do not depend on padding before it. Chosen keys are summed row by row.
void RunPart(const char* op, Context& ctx, const Call& c, const BackwardInputs& in, int64_t part,
             const attention::Gradients& g) {
  const attention::Inputs of = PartInputs(in, part);
  attention::BackwardProblem b = attention::CheckedBackward(
      op, {of.q, of.k, of.v, in.o, LseOf(c, in.lse), in.d_o, LseOf(c, in.d_lse)}, c.options[part], g, Use::kForward);
  std::vector<mechanism::TokenRange> rows;
  for (softmax::Sequence& s : b.problem.sequences) {
    if (c.packed || (part == kCompressed && in.chosen.present())) break;
    const int64_t first = std::clamp<int64_t>(c.sequences[static_cast<size_t>(s.batch)].begin - c.start, 0, c.Tq);
    rows.push_back({s.batch, first, c.Tq});
    s.first_q += first;
    s.start += first;
    s.num_queries -= first;
    s.query_end = std::max<int64_t>(s.query_end - first, 0);
  }
  attention::RunBackward(op, ctx, c.options[part], b.gradients, &b.problem);
  if (!rows.empty()) mechanism::ClearOthers(rows, g.dq);
  if (c.packed) attention::ClearSurplusRows(b.problem, g);
  for (size_t h = 0; h < b.dsinks.size(); ++h) {
    StoreDouble(g.dsinks.dtype(), g.dsinks.data(), static_cast<int64_t>(h) * g.dsinks.stride(0), b.dsinks[h]);
  }
}

// dq of the compressed part, in memory of its own if there is a window, whose part writes to the result.
struct PartialDq {
  TensorView view;
  int64_t bytes = 0;
  std::unique_ptr<void, decltype(&os::FreeAligned)> memory{nullptr, &os::FreeAligned};

  PartialDq(const Call& c, const TensorView& dq) : view(dq) {
    if (!dq.present() || !c.has_window) return;
    view = TensorView(nullptr, dq.dtype(), {c.B, c.Tq, c.Hq, c.D});
    bytes = view.num_elements() * static_cast<int64_t>(SizeOf(dq.dtype()));
  }
  void Allocate() {
    if (bytes == 0) return;
    memory.reset(os::AllocateAligned(bytes));
    view = TensorView(memory.get(), view.dtype(), view.sizes(), view.strides());
  }
};

}  // namespace

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "compressed_attention::Forward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problems
  const Call c = CheckedCall(kOp, &ctx, in, options, out, Use::kForward);
  const attention::Outputs results = {out.o, LseOf(c, out.lse)};
  const Problem whole =
      attention::CheckedProblem(kOp, PartInputs(in, kWindow), c.options[kWindow], results, Use::kForward);
  const auto run = [&](size_t part, const Problem& to) {
    Problem p =
        attention::CheckedProblem(kOp, PartInputs(in, static_cast<int64_t>(part)), c.options[part], {}, Use::kInputs);
    p.o = to.o;
    p.lse = to.lse;
    p.wide_outputs = to.wide_outputs;
    p.sinks = to.sinks;
    attention::Run(kOp, ctx, c.options[part], &p);
  };
  if (c.has_window) {
    attention::RunParts(ctx, whole, 2, run);
  } else {
    run(kCompressed, whole);
  }
  if (c.packed) attention::FillSurplusRows(whole, in.q, results);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "compressed_attention::Workspace";
  const Call c = CheckedCall(kOp, nullptr, in, options, {}, Use::kExplain);
  int64_t most = 0;
  for (int64_t part = c.has_window ? kWindow : kCompressed; part <= kCompressed; ++part) {
    most = std::max(most, attention::Workspace(ctx, PartInputs(in, part), c.options[part]));
  }
  if (!c.has_window) return most;
  const Problem whole = attention::CheckedProblem(kOp, PartInputs(in, kWindow), c.options[kWindow], {}, Use::kExplain);
  return most + attention::PartBytes(whole, 2);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "compressed_attention::Explain";
  const Call c = CheckedCall(kOp, nullptr, in, options, {}, Use::kExplain);
  Explanation x = attention::Explain(ctx, PartInputs(in, kCompressed), c.options[kCompressed]);
  x.kernel = "compressed_attention on " + x.kernel;
  x.why = "compressed keys: " + x.why;
  if (c.has_window) {
    const Explanation window = attention::Explain(ctx, PartInputs(in, kWindow), c.options[kWindow]);
    x.why += "; the window, a call of its own on " + window.kernel + ": " + window.why;
    x.flops += window.flops;
    x.visited_pairs += window.visited_pairs;
    x.invariant = x.invariant && window.invariant;
    x.bytes += mechanism::Bytes(in.k) + mechanism::Bytes(in.v);
  }
  x.bytes += mechanism::Bytes(in.chosen);
  x.workspace_bytes = Workspace(ctx, in, options);
  return x;
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "compressed_attention::Backward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problems
  const Call c = CheckedBackward(kOp, &ctx, in, options, out, Use::kForward);
  PartialDq dq(c, out.dq);
  dq.Allocate();
  for (int64_t part = kWindow; part <= kCompressed; ++part) {
    const attention::Gradients g = GradientsOf(c, out, dq.view, part);
    if (!IsWanted(g)) continue;
    RunPart(kOp, ctx, c, in, part, g);
  }
  if (!c.has_window) {
    Clear(ctx, out.dk);
    Clear(ctx, out.dv);
  } else if (out.dq.present()) {
    Add(ctx, dq.view, out.dq);
  }
}

int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "compressed_attention::BackwardWorkspace";
  const Call c = CheckedBackward(kOp, nullptr, in, options, out, Use::kExplain);
  const PartialDq dq(c, out.dq);
  int64_t most = 0;
  for (int64_t part = kWindow; part <= kCompressed; ++part) {
    const attention::Gradients g = GradientsOf(c, out, dq.view, part);
    if (!IsWanted(g)) continue;
    const attention::Inputs of = PartInputs(in, part);
    most = std::max(most, attention::BackwardWorkspace(ctx, {of.q, of.k, of.v, {}, {}, {}, {}}, c.options[part], g));
  }
  return most + dq.bytes;
}

}  // namespace heed::compressed_attention
