// Attention over a cache: the problem of Forward() with keys and values in pages.
#include "heed/ops/exact/attention/attend.h"

#include <algorithm>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/visit.h"
#include "heed/ops/exact/attention/attend_rotary_internal.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;

// What a cache knows itself, or what decoding has no use for.
void CheckOptions(const Check& check, const Options& options) {
  const struct {
    const char* name;
    const ConstTensorView& view;
  } known[] = {{"query_starts", options.query_starts}, {"key_lengths", options.key_lengths},
               {"query_lengths", options.query_lengths}, {"cu_seqlens_q", options.cu_seqlens_q},
               {"cu_seqlens_k", options.cu_seqlens_k}};
  for (const auto& [name, view] : known) {
    if (view.present()) check.Fail(name, "is given", "none: the cache knows it");
  }
  if (options.align != Align::kBottomRight) {
    check.Fail("align", "is given", "none: the cache knows it");
  }
  if (options.dropout != 0) {
    check.Fail("dropout", "is " + Text(options.dropout), "0: nothing is trained on a cache");
  }
}

// Of a ring: what is gone must not be seen.
void CheckKept(const Check& check, const KVView& cache, const Problem& p) {
  if (cache.first_kept.empty()) return;
  for (const softmax::Sequence& s : p.sequences) {
    const int64_t kept = cache.first_kept[static_cast<size_t>(s.batch)];
    for (int64_t i = 0; i < s.num_queries; ++i) {
      const softmax::KeyRuns runs = softmax::VisibleKeys(p, s, i);
      for (const softmax::Interval& run : {runs.first, runs.second}) {
        const int64_t begin = std::max(run.begin, cache.sink_tokens);
        if (begin >= std::min(run.end, kept)) continue;
        check.Fail("window", "lets row " + Text(i) + " of sequence " + Text(s.batch) +
                                 " see token " + Text(begin),
                   "causal and a window within the ring's, which keeps from token " +
                       Text(kept) + " on");
      }
    }
  }
}

// Rows of one element type, addressed in pages.
softmax::Rows InPages(const PageRows& rows, DType dtype) {
  const auto size = static_cast<int64_t>(SizeOf(dtype));
  softmax::Rows r;
  r.head_stride = rows.head_stride / size;
  r.token_stride = rows.token_stride / size;
  r.page_offset = rows.begin;
  return r;
}

Problem AttendProblem(const char* op, const KVView& cache, const ConstTensorView& q,
                      const Options& options, const Outputs& out, Use use) {
  const Check check(op, use);
  if (cache.quantized) {
    throw Unsupported(std::string(op) + ": no kernel for a quantised cache yet");
  }
  CheckOptions(check, options);
  CheckRotary(check, cache, options);
  check.Present("q", q);
  if (q.dtype() != cache.dtype) {
    check.Fail("q", std::string("has dtype ") + Name(q.dtype()),
               std::string(Name(cache.dtype)) + " as the cache");
  }
  if (q.rank() != 4) check.Fail("q", "has shape " + q.ShapeString(), "[B, T, H, D]");
  check.Shape("q", q, {cache.batch, q.size(1), q.size(2), cache.dim});
  if (q.size(2) % cache.heads != 0) {
    check.Fail("q", "has " + Text(q.size(2)) + " heads",
               "a multiple of the cache's " + Text(cache.heads));
  }

  // Everything about queries, outputs and options is checked as Forward() checks it, against
  // keys and values of the right shape that nobody reads.
  const int64_t longest =
      cache.lengths.empty() ? 0 : *std::max_element(cache.lengths.begin(), cache.lengths.end());
  static constexpr double kUnread = 0;
  const auto unread = [&](int64_t channels) {
    return ConstTensorView(&kUnread, cache.dtype,
                           {cache.batch, longest, cache.heads, channels}, {0, 0, 0, 1});
  };
  std::vector<int64_t> starts, query_lengths;
  for (size_t b = 0; b < static_cast<size_t>(cache.batch); ++b) {
    starts.push_back(cache.lengths[b] - cache.appended[b]);
    query_lengths.push_back(std::min(q.size(1), cache.appended[b]));
  }
  const auto per_sequence = [&](std::span<const int64_t> values) {
    return ConstTensorView(values.data(), DType::kI64, {cache.batch});
  };
  Options whole = options;
  whole.query_starts = per_sequence(starts);
  whole.key_lengths = per_sequence(cache.lengths);
  whole.query_lengths = per_sequence(query_lengths);
  Problem p = CheckedProblem(op, {q, unread(cache.dim), unread(cache.value_dim)}, whole, out, use);
  p.k = InPages(cache.key, cache.dtype);
  p.v = InPages(cache.value, cache.dtype);
  p.page_tokens = cache.page_tokens;
  p.pages_gone = !cache.first_kept.empty();
  for (softmax::Sequence& s : p.sequences) s.pages = cache.pages[s.batch];
  CheckKept(check, cache, p);
  return p;
}

}  // namespace

void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q,
            const Options& options, const Outputs& out) {
  constexpr char kOp[] = "attention::Attend";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  const Problem p = AttendProblem(kOp, cache, q, options, out, Use::kForward);
  if (cache.rotary != nullptr) return AttendRotated(ctx, cache, q, options, out);
  softmax::Choose(kOp, ctx, p).run(ctx, p);
}

Explanation ExplainAttend(const Context& ctx, const KVView& cache, const ConstTensorView& q,
                          const Options& options) {
  constexpr char kOp[] = "attention::ExplainAttend";
  const Problem p = AttendProblem(kOp, cache, q, options, {}, Use::kExplain);
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, p);
  const auto size = static_cast<double>(SizeOf(cache.dtype));
  double tokens = 0;
  for (const int64_t length : cache.lengths) tokens += static_cast<double>(length);
  const auto of_values = static_cast<double>(cache.key.begin == cache.value.begin
                                                 ? 0
                                                 : cache.value_dim);
  Explanation e;
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = kernel.why;
  e.flops = 2 * static_cast<double>(p.depth + p.value_depth) * softmax::KeptPairs(p);
  e.bytes = size * (tokens * static_cast<double>(cache.heads) *
                        (static_cast<double>(cache.dim) + of_values) +
                    static_cast<double>(q.num_elements() / cache.dim) *
                        static_cast<double>(cache.dim + cache.value_dim));
  e.workspace_bytes =
      kernel.workspace(ctx, p) * ctx.num_threads() + RotaryBytes(cache, q);
  e.visited_pairs = softmax::VisitedPairs(p, kernel.lanes(ctx, p), kernel.grid);
  e.invariant = kernel.invariant;
  return e;
}

}  // namespace heed::attention
