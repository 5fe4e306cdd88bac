// Longformer on the softmax engine: the problem of all rows under a pattern and, where global tokens have separate
// projections, the problem of their rows, whose results replace those of the first.
#include "heed/ops/sparse/longformer/longformer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "heed/core/os.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/longformer/longformer_internal.h"

namespace heed::longformer {
namespace {

using attention::Use;
using mechanism::Fail;
using softmax::Pass;
using softmax::Problem;
using softmax::Rows;

// Checks that a tensor has the shape and dtype of another. Without `data`, pointers may be null.
void CheckLike(const char* op, const char* name, const ConstTensorView& t, const char* of, const ConstTensorView& like,
               bool data) {
  if (!t.present()) Fail(op, name, "is absent", "qg, kg and vg, or none of them");
  if (t.dtype() != like.dtype()) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), std::string(Name(like.dtype())) + " as " + of);
  }
  if (!std::ranges::equal(t.sizes(), like.sizes())) {
    Fail(op, name, "has shape " + t.ShapeString(), like.ShapeString() + " as " + of);
  }
  if (data || t.data() != nullptr) mechanism::CheckReadable(op, name, t);
  if (t.rank() > 0) mechanism::CheckContiguousRows(op, name, t);
}

// All inputs, for the overlap checks of outputs.
mechanism::Apart Reads(const BackwardInputs& in, const Options& options) {
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"qg", in.qg},
                                   {"kg", in.kg},
                                   {"vg", in.vg},
                                   {"o", in.o},
                                   {"lse", in.lse},
                                   {"d_o", in.d_o},
                                   {"d_lse", in.d_lse},
                                   {"tokens", options.tokens},
                                   {"key_lengths", options.key_lengths},
                                   {"key_starts", options.key_starts},
                                   {"query_lengths", options.query_lengths},
                                   {"cu_seqlens_q", options.cu_seqlens_q}}) {
    apart.Reads(name, view);
  }
  return apart;
}

Rows RowsOf(const Call& c, const ConstTensorView& t) {
  Rows rows = t.present() ? attention::RowsOf(t) : Rows();
  if (c.options.cu_seqlens_q.present()) rows.batch_stride = 0;
  return rows;
}

// The problem of the rows of global tokens.
struct OfTokens {
  TokenRows rows;
  TokenMemory memory;
  Problem problem;

  OfTokens(const Call& c, const Problem& all, const Inputs& in, bool backward)
      : rows(all, c.tokens), memory(all, rows.count(), backward),
        problem(rows.ProblemOf(all, RowsOf(c, in.kg), RowsOf(c, in.vg))) {}

  void Allocate() {
    memory.Allocate();
    problem.q = memory.q;
    problem.o = memory.o;
    problem.lse = memory.lse;
  }
};

DType LseDType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Bytes of scratch of all threads, and of gathered rows.
int64_t ForwardBytes(const char* op, const Context& ctx, const Call& c, const Problem& all, const Inputs& in) {
  const auto bytes = [&](const Problem& p) {
    return softmax::Choose(op, ctx, p).workspace(ctx, p) * ctx.num_threads();
  };
  if (!c.own) return bytes(all);
  const OfTokens tokens(c, all, in, false);
  return std::max(bytes(all), bytes(tokens.problem)) + tokens.memory.bytes();
}

double NumBytes(const ConstTensorView& t) {
  return static_cast<double>(t.num_elements()) * static_cast<double>(SizeOf(t.dtype()));
}

void Clear(const TensorView& t) {
  const int r = t.rank();
  const auto size = static_cast<int64_t>(SizeOf(t.dtype()));
  for (int64_t b = 0; b < (r == 4 ? t.size(0) : 1); ++b) {
    for (int64_t token = 0; token < t.size(r - 3); ++token) {
      for (int64_t h = 0; h < t.size(r - 2); ++h) {
        const int64_t at = (r == 4 ? b * t.stride(0) : 0) + token * t.stride(r - 3) + h * t.stride(r - 2);
        std::memset(static_cast<char*>(t.data()) + at * size, 0, static_cast<size_t>(t.size(r - 1) * size));
      }
    }
  }
}

// Checks the arguments that attention has too, and returns the problem of all rows.
Problem AllRows(const char* op, const Call& c, const Inputs& in, const attention::Outputs& out, Use use) {
  Problem all = attention::CheckedProblem(op, {in.q, in.k, in.v}, c.options, out, use);
  attention::PlacePattern(op, c.options.pattern, /*to_lengths=*/false, &all);
  return all;
}

// Checks the arguments of Backward, and returns the problem of all rows.
attention::BackwardProblem CheckedBackward(const char* op, const Call& c, const BackwardInputs& in,
                                           const Options& options, const Gradients& out, bool data) {
  for (const auto& [name, view, of, like] :
       {std::tuple{"dqg", out.dqg, "qg", in.qg}, {"dkg", out.dkg, "kg", in.kg}, {"dvg", out.dvg, "vg", in.vg}}) {
    if (!view.present()) continue;
    if (!like.present()) Fail(op, name, "is asked for", std::string(of) + " with it");
    CheckLike(op, name, view, of, like, data);
  }
  attention::BackwardProblem b =
      attention::CheckedBackward(op, {in.q, in.k, in.v, in.o, in.lse, in.d_o, in.d_lse}, c.options,
                                 {out.dq, out.dk, out.dv, {}, {}, {}, {}, {}}, data ? Use::kForward : Use::kExplain);
  attention::PlacePattern(op, c.options.pattern, /*to_lengths=*/false, &b.problem);
  mechanism::Apart apart = Reads(in, options);
  for (const auto& [name, view] : {std::pair{"dq", out.dq},
                                   {"dk", out.dk},
                                   {"dv", out.dv},
                                   {"dqg", out.dqg},
                                   {"dkg", out.dkg},
                                   {"dvg", out.dvg}}) {
    if (data) apart.Writes(op, name, view);
  }
  return b;
}

// Views of the gradients of global tokens. A described tensor without data gets a non-null address, which marks it as
// present.
softmax::Gradients GradientsOf(const Call& c, const OfTokens& tokens, const BackwardInputs& in, const Gradients& out) {
  static char described;
  const auto there = [](Rows rows, const TensorView& t) {
    if (t.present() && rows.data == nullptr) rows.data = &described;
    return rows;
  };
  softmax::Gradients g;
  g.d_o = tokens.memory.d_o;
  if (in.d_lse.present()) g.d_lse = tokens.memory.d_lse;
  if (out.dqg.present()) g.dq = there(tokens.memory.dq, out.dqg);
  g.dk = there(RowsOf(c, out.dkg), out.dkg);
  g.dv = there(RowsOf(c, out.dvg), out.dvg);
  return g;
}

}  // namespace

attention::Options AttentionOptions(const Options& options) {
  attention::Options shared;
  ForEachShared([&](auto own, auto there) { shared.*there = options.*own; });
  return shared;
}

Call CheckedCall(const char* op, const Inputs& in, const Options& options, bool data) {
  Call c;
  c.own = in.qg.present() || in.kg.present() || in.vg.present();
  for (const auto& [name, t] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) {
    if (!t.present() || (t.dtype() == in.q.dtype() && IsFloat(t.dtype()))) continue;
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()),
         IsFloat(in.q.dtype()) ? std::string(Name(in.q.dtype())) + " as q" : "f64, f32, bf16 or f16");
  }
  if (c.own) {
    CheckLike(op, "qg", in.qg, "q", in.q, data);
    CheckLike(op, "kg", in.kg, "k", in.k, data);
    CheckLike(op, "vg", in.vg, "v", in.v, data);
  }
  const int r = in.q.rank();
  if (r >= 3 && in.k.rank() == r && in.k.size(r - 3) != in.q.size(r - 3)) {
    Fail(op, "k", "has " + std::to_string(in.k.size(r - 3)) + " tokens", std::to_string(in.q.size(r - 3)) + " as q");
  }
  const patterns::Table table = patterns::Copied(op, "tokens", options.tokens, false);
  const bool packed = options.cu_seqlens_q.present();
  const int64_t batches = packed ? options.cu_seqlens_q.num_elements() - 1 : r == 4 ? in.q.size(0) : -1;
  if (table.rank() == 2 && batches >= 0 && table.size(0) != 1 && table.size(0) != batches) {
    const std::string of = std::to_string(batches);
    Fail(op, "tokens", "has shape " + ShapeString(table.shape), "[n], or [" + of + ", n] by sequence");
  }
  c.options = AttentionOptions(options);
  c.options.pattern = patterns::Build("longformer", {options.window, table});
  if (c.own) c.options.pattern = c.options.pattern & patterns::OtherRows(table);
  c.tokens = patterns::AscendingTokens(table);
  return c;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "longformer::Forward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  const Call c = CheckedCall(kOp, in, options, true);
  const attention::Inputs all_in = {in.q, in.k, in.v};
  const Problem all = AllRows(kOp, c, in, {out.o, out.lse}, Use::kForward);
  BackwardInputs reads;
  static_cast<Inputs&>(reads) = in;
  mechanism::Apart apart = Reads(reads, options);
  apart.Writes(kOp, "o", out.o);
  apart.Writes(kOp, "lse", out.lse);

  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, all);
  if (!c.own) {
    kernel.forward(ctx, all);
  } else {
    OfTokens tokens(c, all, in, false);
    const softmax::Kernel& kernel_of_tokens = softmax::Choose(kOp, ctx, tokens.problem);
    tokens.Allocate();
    tokens.rows.Gather(RowsOf(c, in.qg), tokens.memory.q, all.dtype, all.depth);
    kernel.forward(ctx, all);
    kernel_of_tokens.forward(ctx, tokens.problem);
    tokens.rows.PutBack(tokens.memory.o, all.o, all.dtype, all.value_depth);
    if (out.lse.present()) tokens.rows.PutBack(tokens.memory.lse, all.lse, LseDType(all.dtype), 1);
  }
  if (c.options.cu_seqlens_q.present()) attention::FillSurplusRows(all, all_in.q, {out.o, out.lse});
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "longformer::Backward";
  const os::ScopedFloatControl float_control;
  const Call c = CheckedCall(kOp, in, options, true);
  const attention::BackwardProblem b = CheckedBackward(kOp, c, in, options, out, true);
  const Problem& all = b.problem;
  const bool packed = c.options.cu_seqlens_q.present();
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, all, Pass::kBackward);
  if (c.own) {
    OfTokens tokens(c, all, in, true);
    const softmax::Kernel& kernel_of_tokens = softmax::Choose(kOp, ctx, tokens.problem, Pass::kBackward);
    tokens.Allocate();
    const TokenMemory& memory = tokens.memory;
    tokens.rows.Gather(RowsOf(c, in.qg), memory.q, all.dtype, all.depth);
    tokens.rows.Gather(all.o, memory.o, all.dtype, all.value_depth);
    tokens.rows.Gather(b.gradients.d_o, memory.d_o, all.dtype, all.value_depth);
    tokens.rows.Gather(all.lse, memory.lse, LseDType(all.dtype), 1);
    if (in.d_lse.present()) tokens.rows.Gather(b.gradients.d_lse, memory.d_lse, LseDType(all.dtype), 1);
    kernel_of_tokens.backward(ctx, tokens.problem, GradientsOf(c, tokens, in, out));
    if (out.dqg.present()) {
      Clear(out.dqg);
      tokens.rows.PutBack(memory.dq, RowsOf(c, out.dqg), all.dtype, all.depth);
    }
    if (packed) attention::ClearSurplusRows(tokens.problem, {{}, out.dkg, out.dvg, {}, {}, {}, {}, {}});
  }
  kernel.backward(ctx, all, b.gradients);
  if (packed) attention::ClearSurplusRows(all, {out.dq, out.dk, out.dv, {}, {}, {}, {}, {}});
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "longformer::Workspace";
  const Call c = CheckedCall(kOp, in, options, false);
  return ForwardBytes(kOp, ctx, c, AllRows(kOp, c, in, {}, Use::kExplain), in);
}

int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "longformer::BackwardWorkspace";
  const Call c = CheckedCall(kOp, in, options, false);
  const attention::BackwardProblem b = CheckedBackward(kOp, c, in, options, out, false);
  const auto bytes = [&](const Problem& p, const softmax::Gradients& g) {
    const softmax::BackwardBytes of = softmax::Choose(kOp, ctx, p, Pass::kBackward).backward_workspace(ctx, p, g);
    return of.per_thread * ctx.num_threads() + of.shared;
  };
  if (!c.own) return bytes(b.problem, b.gradients);
  const OfTokens tokens(c, b.problem, in, true);
  return std::max(bytes(b.problem, b.gradients), bytes(tokens.problem, GradientsOf(c, tokens, in, out))) +
         tokens.memory.bytes();
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "longformer::Explain";
  const Call c = CheckedCall(kOp, in, options, false);
  const Problem all = AllRows(kOp, c, in, {}, Use::kExplain);
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, all);
  double kept = softmax::KeptPairs(all), visited = softmax::VisitedPairs(all, kernel.lanes(ctx, all), kernel.grid);
  bool invariant = kernel.invariant;
  if (c.own) {
    const Problem tokens = OfTokens(c, all, in, false).problem;
    const softmax::Kernel& other = softmax::Choose(kOp, ctx, tokens);
    kept += softmax::KeptPairs(tokens);
    visited += softmax::VisitedPairs(tokens, other.lanes(ctx, tokens), other.grid);
    invariant = invariant && other.invariant;
  }
  Explanation x;
  x.kernel = std::string("longformer on ") + kernel.name;
  x.target = kernel.target(ctx);
  x.why = c.own ? "all rows under a pattern, then those of tokens alone: " : "all rows under a pattern: ";
  x.why += attention::Why(kernel, all);
  x.flops = 2 * static_cast<double>(all.depth + all.value_depth) * kept;
  const double o = NumBytes(in.q) / static_cast<double>(all.depth) * static_cast<double>(all.value_depth);
  x.bytes = NumBytes(in.q) + NumBytes(in.k) + NumBytes(in.v) + NumBytes(in.kg) + NumBytes(in.vg) + o;
  x.workspace_bytes = ForwardBytes(kOp, ctx, c, all, in);
  x.visited_pairs = visited;
  x.invariant = invariant;
  return x;
}

}  // namespace heed::longformer
