// Runs calls in parts: layers of pairs, or parts whose keys are in different tensors. With several parts, each part's
// result is computed in the accumulation dtype, then merged:
//
//   lse = log sum_i e^lse_i      o = sum_i e^(lse_i - lse) o_i
//
// Gradients are the sum of the parts' gradients: P = e^(S - lse) of a pair is right in any part, since lse and delta
// are those of the whole row.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/core/error.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/pattern/attention_tables_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;
using softmax::Rows;
using softmax::Sequence;

template <class T>
struct Answers {
  std::vector<Rows> o, lse;  // per part

  int64_t LayOut(const Problem& p, size_t parts, void* base) {
    Carver carver(base);
    for (size_t i = 0; i < parts; ++i) {
      o.push_back(Table<T>(carver, QueriesOf(p), p.query_heads, p.value_depth));
      lse.push_back(Table<T>(carver, QueriesOf(p), p.query_heads, 1));
    }
    return carver.bytes();
  }
};

// Accumulators of dq, dk and dv, where requested: the sum over layers so far, and one layer's result.
template <class T>
struct Sums {
  Rows sum[3], one[3];

  int64_t LayOut(const Problem& p, const softmax::Gradients& g, void* base) {
    Carver carver(base);
    for (Rows* rows : {sum, one}) {
      if (g.dq.data != nullptr) rows[0] = Table<T>(carver, QueriesOf(p), p.query_heads, p.depth);
      if (g.dk.data != nullptr) rows[1] = Table<T>(carver, KeysOf(p), p.key_heads, p.depth);
      if (g.dv.data != nullptr) rows[2] = Table<T>(carver, KeysOf(p), p.key_heads, p.value_depth);
    }
    return carver.bytes();
  }
};

// Calls f(batch, token, head, worker) for all queries, or keys, sequence by sequence.
template <class F>
void ForTokens(Context& ctx, const Problem& p, int64_t Sequence::* first, int64_t Sequence::* count, int64_t heads,
               const F& f) {
  for (const Sequence& s : p.sequences) {
    ctx.ParallelFor(s.*count, [&](int64_t i, int worker) {
      for (int64_t head = 0; head < heads; ++head) f(s.batch, s.*first + i, head, worker);
    });
  }
}

// Merges one row of o and lse from its parts.
template <class T>
void MergeRow(const Problem& p, const Answers<T>& answers, int64_t batch, int64_t token, int64_t head, T* o) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  double max = kNone;
  for (const Rows& rows : answers.lse) {
    const auto lse = static_cast<double>(*At<T>(rows, batch, token, head));
    if (std::isnan(max) || std::isnan(lse)) max = std::numeric_limits<double>::quiet_NaN();
    max = std::max(max, lse);  // keeps a NaN, unlike the other order of arguments
  }
  double total = 0;
  const auto weight = [&](size_t part) {
    const auto lse = static_cast<double>(*At<T>(answers.lse[part], batch, token, head));
    return lse == kNone ? 0 : std::exp(lse - max);
  };
  for (size_t i = 0; i < answers.lse.size(); ++i) total += weight(i);
  const double lse = total == 0 ? kNone : max + std::log(total);
  double factor = total == 0 ? 0 : 1 / total;
  if (!p.sinks.empty() && total != 0) factor /= 1 + std::exp(p.sinks[static_cast<size_t>(head)] - lse);
  std::fill(o, o + p.value_depth, T{0});
  for (size_t i = 0; i < answers.o.size(); ++i) {
    const double w = weight(i);
    if (w == 0) continue;
    const T share = static_cast<T>(w * factor);
    const T* of_part = At<T>(answers.o[i], batch, token, head);
    for (int64_t e = 0; e < p.value_depth; ++e) o[e] += share * of_part[e];
  }
  Store<T>(p.dtype, o, p.value_depth, p.o, batch, token, head);
  if (p.lse.data != nullptr) *At<T>(p.lse, batch, token, head) = static_cast<T>(lse);
}

void RunSubproblems(const char* op, Context& ctx, const std::vector<Subproblem>& subproblems) {
  for (const auto& [problem, gradients] : subproblems) softmax::Choose(op, ctx, problem).forward(ctx, problem);
}

void RunBackwardSubproblems(const char* op, Context& ctx, const std::vector<Subproblem>& subproblems) {
  for (const auto& [problem, gradients] : subproblems) {
    softmax::Choose(op, ctx, problem, softmax::Pass::kBackward).backward(ctx, problem, gradients);
  }
}

template <class T>
void Merge(Context& ctx, const Problem& whole, size_t parts, const RunPart& run) {
  Answers<T> unplaced, answers;
  ctx.ReserveTables(unplaced.LayOut(whole, parts, nullptr));
  answers.LayOut(whole, parts, ctx.Tables());
  for (size_t i = 0; i < parts; ++i) {
    Problem p = whole;
    p.sinks.clear();  // which count once per row
    p.wide_outputs = true;
    p.o = answers.o[i];
    p.lse = answers.lse[i];
    run(i, p);
  }
  ctx.ReserveScratch(whole.value_depth * int64_t{sizeof(T)});
  ForTokens(ctx, whole, &Sequence::first_q, &Sequence::num_queries, whole.query_heads,
            [&](int64_t batch, int64_t token, int64_t head, int worker) {
              MergeRow<T>(whole, answers, batch, token, head, static_cast<T*>(ctx.Scratch(worker)));
            });
}

template <class T>
void MergeBackward(const char* op, Context& ctx, const Problem& whole, const Options& options,
                   const std::vector<Layer>& layers, const softmax::Gradients& gradients) {
  Sums<T> unplaced, sums;
  ctx.ReserveTables(unplaced.LayOut(whole, gradients, nullptr));
  sums.LayOut(whole, gradients, ctx.Tables());
  const struct {
    const Rows& out;
    int64_t depth, heads;
    int64_t Sequence::*first, Sequence::*count;
  } kinds[] = {{gradients.dq, whole.depth, whole.query_heads, &Sequence::first_q, &Sequence::num_queries},
               {gradients.dk, whole.depth, whole.key_heads, &Sequence::first_k, &Sequence::num_keys},
               {gradients.dv, whole.value_depth, whole.key_heads, &Sequence::first_k, &Sequence::num_keys}};
  for (size_t i = 0; i < layers.size(); ++i) {
    const Rows* to = i == 0 ? sums.sum : sums.one;
    softmax::Gradients g = gradients;
    g.wide = true;
    g.dq = to[0];
    g.dk = to[1];
    g.dv = to[2];
    if (i > 0) g.dsinks = nullptr;  // depends on whole rows, so it is computed once
    RunBackwardSubproblems(op, ctx, SubproblemsOf(op, whole, options, layers[i], g));
    for (size_t k = 0; k < std::size(kinds); ++k) {
      const auto& kind = kinds[k];
      if (kind.out.data == nullptr) continue;
      ForTokens(ctx, whole, kind.first, kind.count, kind.heads, [&](int64_t batch, int64_t token, int64_t head, int) {
        T* sum = At<T>(sums.sum[k], batch, token, head);
        const T* one = At<T>(sums.one[k], batch, token, head);
        for (int64_t e = 0; i > 0 && e < kind.depth; ++e) sum[e] += one[e];
        if (i + 1 == layers.size()) Store<T>(whole.dtype, sum, kind.depth, kind.out, batch, token, head);
      });
    }
  }
}

}  // namespace

void RunParts(Context& ctx, const Problem& whole, size_t parts, const RunPart& run) {
  (whole.dtype == DType::kF64 ? &Merge<double> : &Merge<float>)(ctx, whole, parts, run);
}

int64_t PartBytes(const Problem& whole, size_t parts) {
  return whole.dtype == DType::kF64 ? Answers<double>().LayOut(whole, parts, nullptr)
                                    : Answers<float>().LayOut(whole, parts, nullptr);
}

void Run(const char* op, Context& ctx, const Options& options, Problem* whole) {
  const std::vector<Layer> layers = LayersOf(*whole, options);
  if (layers[0].kind == Layer::kTiles) {  // a single layer, without copies
    PlacePattern(op, options.pattern, /*to_lengths=*/false, whole);
    softmax::Choose(op, ctx, *whole).forward(ctx, *whole);
  } else if (layers.size() == 1) {
    RunSubproblems(op, ctx, SubproblemsOf(op, *whole, options, layers[0]));
  } else {
    RunParts(ctx, *whole, layers.size(),
             [&](size_t i, const Problem& p) { RunSubproblems(op, ctx, SubproblemsOf(op, p, options, layers[i])); });
  }
}

void RunBackward(const char* op, Context& ctx, const Options& options, const softmax::Gradients& gradients,
                 Problem* whole) {
  const std::vector<Layer> layers = LayersOf(*whole, options);
  if (layers[0].kind == Layer::kTiles) {
    PlacePattern(op, options.pattern, /*to_lengths=*/false, whole);
    softmax::Choose(op, ctx, *whole, softmax::Pass::kBackward).backward(ctx, *whole, gradients);
  } else if (layers[0].kind == Layer::kRows) {
    RunBackwardOfRows(op, ctx, options.pattern, gradients, *whole);
  } else if (layers.size() == 1) {
    RunBackwardSubproblems(op, ctx, SubproblemsOf(op, *whole, options, layers[0], gradients));
  } else if (whole->dtype == DType::kF64) {
    MergeBackward<double>(op, ctx, *whole, options, layers, gradients);
  } else {
    MergeBackward<float>(op, ctx, *whole, options, layers, gradients);
  }
}

int64_t BytesOf(const char* op, const Context& ctx, const Problem& whole, const Options& options) {
  const std::vector<Layer> layers = LayersOf(whole, options);
  int64_t most = 0;
  for (const Layer& layer : layers) {
    for (const auto& [problem, gradients] : SubproblemsOf(op, whole, options, layer)) {
      most = std::max(most, softmax::Choose(op, ctx, problem).workspace(ctx, problem) * ctx.num_threads());
    }
  }
  return most + (layers.size() > 1 ? PartBytes(whole, layers.size()) : 0) + softmax::DecayBytes(whole);
}

int64_t BackwardBytesOf(const char* op, const Context& ctx, const Problem& whole, const Options& options,
                        const softmax::Gradients& gradients) {
  const std::vector<Layer> layers = LayersOf(whole, options);
  if (layers[0].kind == Layer::kRows) return BackwardBytesOfRows(op, ctx, options.pattern, gradients, whole);
  int64_t most = 0, kept = 0;
  for (const Layer& layer : layers) {
    for (const auto& [problem, own] : SubproblemsOf(op, whole, options, layer, gradients)) {
      const softmax::BackwardBytes bytes =
          softmax::Choose(op, ctx, problem, softmax::Pass::kBackward).backward_workspace(ctx, problem, own);
      most = std::max(most, bytes.per_thread * ctx.num_threads() + bytes.shared);
    }
  }
  if (layers.size() > 1) {
    kept = whole.dtype == DType::kF64 ? Sums<double>().LayOut(whole, gradients, nullptr)
                                      : Sums<float>().LayOut(whole, gradients, nullptr);
  }
  return most + kept + softmax::DecayBytes(whole);
}

}  // namespace heed::attention
