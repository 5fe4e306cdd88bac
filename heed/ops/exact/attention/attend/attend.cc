// Attend(): attention over a KV cache. It builds the problem of Forward() with keys and values in pages.
#include "heed/ops/exact/attention/attend/attend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/ops/exact/attention/attend/attend_internal.h"
#include "heed/ops/exact/attention/attend/attend_rotary_internal.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed::attention {
namespace {

using softmax::Problem;

constexpr double kInt8Steps = 127;  // quantisation steps up to the largest element of a row

// Throws if a row sees tokens that a ring cache has already overwritten.
void CheckKept(const Check& check, const KVView& cache, const Problem& p) {
  if (cache.first_kept.empty()) return;
  for (const softmax::Sequence& s : p.sequences) {
    const int64_t kept = cache.first_kept[static_cast<size_t>(s.batch)];
    for (int64_t i = 0; i < s.num_queries; ++i) {
      const softmax::KeyRuns runs = softmax::VisibleKeys(p, s, i);
      for (const softmax::Interval& run : {runs.first, runs.second}) {
        const int64_t begin = std::max(run.begin, cache.sink_tokens);
        if (begin >= std::min(run.end, kept)) continue;
        check.Fail("window", "lets row " + Text(i) + " of sequence " + Text(s.batch) + " see token " + Text(begin),
                   "causal and a window within the ring's, which keeps from token " + Text(kept) + " on");
      }
    }
  }
}

// Describes paged rows of elements of `element` bytes.
softmax::Rows InPages(const PageRows& rows, size_t element) {
  const auto size = static_cast<int64_t>(element);
  softmax::Rows r;
  r.head_stride = rows.head_stride / size;
  r.token_stride = rows.token_stride / size;
  r.page_offset = rows.begin;
  return r;
}

size_t ElementOf(const KVView& cache) { return cache.quantized ? sizeof(int8_t) : SizeOf(cache.dtype); }

// True if a block may hold rows of several sequences. Their visible keys may then differ only by key ranges, so a mask
// or segments rule it out.
bool CanShare(const Problem& p) { return p.mask.data == nullptr && p.segments_q.empty(); }

int64_t SegmentBoundary(const softmax::Sequence& s, int64_t key) {
  const int64_t keys = std::max<int64_t>(key - s.key_begin, 0);
  return s.key_begin + keys / softmax::kSegmentKeys * softmax::kSegmentKeys;
}

void SharePrefix(const KVView& cache, Problem* p) {
  constexpr int64_t kMostQueries = 16;  // beyond this, storing partial softmax states costs more than reading the
                                        // shared keys again
  const softmax::Sequence& first = p->sequences.front();
  const int64_t end = SegmentBoundary(first, cache.shared_prefix);
  bool shares = CanShare(*p) && cache.batch > 1 && end > 0 && first.num_queries <= kMostQueries;
  for (const softmax::Sequence& s : p->sequences) shares = shares && s.key_begin == 0;
  if (!shares) return;
  for (softmax::Sequence& s : p->sequences) s.own_begin = end;
  p->shared = {{0, cache.batch, end}};
}

// The problem and the arrays it points into.
struct Call {
  Problem p;
  std::vector<int64_t> tails;
};

// Maps a draft tree onto sequences: each node becomes a sequence of one query, whose keys end with its ancestors.
void PlantTree(const Check& check, std::span<const int64_t> tree, Call* call) {
  std::vector<std::vector<int64_t>> branches;  // path from the root to each node
  for (size_t i = 0; i < tree.size(); ++i) {
    const int64_t parent = tree[i];
    if (parent < -1 || parent >= static_cast<int64_t>(i)) {
      check.Fail("tree", "has parent " + Text(parent) + " of node " + Text(i), "an earlier node, or -1");
    }
    branches.push_back(parent < 0 ? std::vector<int64_t>() : branches[static_cast<size_t>(parent)]);
    branches.back().push_back(static_cast<int64_t>(i));
  }
  Problem& p = call->p;
  const std::vector<softmax::Sequence> whole = std::move(p.sequences);
  p.sequences.clear();
  const auto nodes = static_cast<int64_t>(tree.size());
  if (!whole.empty() && whole.front().num_queries != nodes) {
    check.Fail("tree", "has " + Text(nodes) + " nodes", Text(whole.front().num_queries) + " as q");
  }
  std::vector<size_t> tail_at;
  for (const softmax::Sequence& s : whole) {
    const int64_t boundary = SegmentBoundary(s, s.start);
    const auto first = static_cast<int64_t>(p.sequences.size());
    for (int64_t i = 0; i < nodes; ++i) {
      const std::vector<int64_t>& branch = branches[static_cast<size_t>(i)];
      softmax::Sequence node = s;
      node.first_q = i;
      node.num_queries = 1;
      node.query_end = i < s.query_end ? 1 : 0;
      node.start = s.start + static_cast<int64_t>(branch.size()) - 1;
      node.num_keys = node.start + 1;
      node.key_end = std::max(node.key_begin, std::min(s.key_end, node.num_keys));
      node.prefix_end = std::min(node.prefix_end, node.key_end);
      node.sink_end = std::min(node.sink_end, node.key_end);
      node.tail_begin = boundary;
      tail_at.push_back(call->tails.size());
      for (int64_t j = boundary; j < node.num_keys; ++j) {
        const auto in_draft = static_cast<size_t>(std::max<int64_t>(j - s.start, 0));
        call->tails.push_back(j < s.start ? j : s.start + branch[in_draft]);
      }
      p.sequences.push_back(node);
    }
    if (!CanShare(p) || boundary == s.key_begin || nodes == 1) continue;
    for (int64_t i = first; i < first + nodes; ++i) {
      p.sequences[static_cast<size_t>(i)].own_begin = boundary;
    }
    p.shared.push_back({first, nodes, boundary});
  }
  for (size_t i = 0; i < tail_at.size(); ++i) {
    p.sequences[i].tail = call->tails.data() + tail_at[i];
  }
}

Call AttendCall(const char* op, const KVView& cache, const ConstTensorView& q, const Options& options,
                const Outputs& out, std::span<const int64_t> tree, Use use) {
  const Check check(op, use);
  CheckCacheOptions(check, options);
  CheckRotary(check, cache, options, tree);
  check.Present("q", q);
  if (q.dtype() != cache.dtype) {
    check.Fail("q", std::string("has dtype ") + Name(q.dtype()), std::string(Name(cache.dtype)) + " as the cache");
  }
  if (q.rank() != 4) check.Fail("q", "has shape " + q.ShapeString(), "[B, T, H, D]");
  check.Shape("q", q, {cache.batch, q.size(1), q.size(2), cache.dim});
  if (q.size(2) % cache.heads != 0) {
    check.Fail("q", "has " + Text(q.size(2)) + " heads", "a multiple of the cache's " + Text(cache.heads));
  }

  if (cache.log_decay_heads > 0) {
    if (q.size(2) != cache.log_decay_heads) {
      check.Fail("q", "has " + Text(q.size(2)) + " heads",
                 Text(cache.log_decay_heads) + ", whose log decays the cache keeps");
    }
    if (!options.causal) check.Fail("causal", "is false", "true with log decays");
  }

  // Queries, outputs and options are checked as in Forward().
  const int64_t longest = cache.lengths.empty() ? 0 : *std::max_element(cache.lengths.begin(), cache.lengths.end());
  std::vector<int64_t> starts, query_lengths;
  for (size_t b = 0; b < static_cast<size_t>(cache.batch); ++b) {
    starts.push_back(cache.lengths[b] - cache.appended[b]);
    query_lengths.push_back(std::min(q.size(1), cache.appended[b]));
  }
  const int64_t most = cache.appended.empty() ? 0 : *std::ranges::max_element(cache.appended);
  if (cache.batch > 0 && q.size(1) > most) {
    check.Fail("q", "has " + Text(q.size(1)) + (q.size(1) == 1 ? " query" : " queries"),
               "at most " + Text(most) + ", the tokens that a sequence was given last");
  }
  const auto per_sequence = [&](std::span<const int64_t> values) {
    return ConstTensorView(values.data(), DType::kI64, {cache.batch});
  };
  Options whole = options;
  whole.query_starts = per_sequence(starts);
  whole.key_lengths = per_sequence(cache.lengths);
  whole.query_lengths = per_sequence(query_lengths);
  whole.pattern = {};  // refers to the keys appended so far
  Call call{CheckedQueries(op, q, {longest, cache.heads, cache.value_dim}, whole, out, use), {}};
  Problem& p = call.p;
  p.invariant = true;  // bitwise equal between prefill and decode
  const size_t element = ElementOf(cache);
  p.k = InPages(cache.key, element);
  p.v = InPages(cache.value, element);
  p.quantized = cache.quantized;
  if (cache.quantized) {
    p.k_scale = InPages(cache.key_scale, sizeof(float));
    p.v_scale = InPages(cache.value_scale, sizeof(float));
  }
  if (cache.log_decay_heads > 0) {
    p.forgets = true;
    p.log_decay_dtype = cache.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    p.log_decay = InPages(cache.log_decay, SizeOf(p.log_decay_dtype));
  }
  p.page_tokens = cache.page_tokens;
  p.pages_gone = !cache.first_kept.empty();
  // An empty sequence may have no page table. It gets one with a null page, since keys without a table count as not
  // paged.
  static constexpr const std::byte* kNoPages[] = {nullptr};
  for (softmax::Sequence& s : p.sequences) {
    const std::byte* const* const pages = cache.pages[s.batch];
    s.pages = pages == nullptr ? kNoPages : pages;
  }
  if (!tree.empty()) {
    PlantTree(check, tree, &call);
  } else if (!p.sequences.empty()) {
    SharePrefix(cache, &p);
  }
  PlacePattern(op, options.pattern, /*to_lengths=*/true, &p);
  CheckKept(check, cache, p);
  softmax::LayOutDecays(&p);
  return call;
}

}  // namespace

void CheckCacheOptions(const Check& check, const Options& options, std::initializer_list<std::string_view> taken) {
  for (const OptionRow& row : kOptionRows) {
    if (row.not_on_cache == nullptr || !IsGiven(row, options) || std::ranges::count(taken, row.name) > 0) continue;
    const auto* number = std::get_if<double Options::*>(&row.field);
    check.Fail(row.name, number == nullptr ? "is given" : "is " + Text(options.**number),
               std::string(number == nullptr ? "none: " : "0: ") + row.not_on_cache);
  }
}

Problem AttendProblem(const char* op, const KVView& cache, const ConstTensorView& q, const Options& options,
                      const Outputs& out) {
  return AttendCall(op, cache, q, options, out, {}, Use::kForward).p;
}

void CheckSketch(const char* op, const KVView& cache) {
  if (!cache.sketch.present) mechanism::Fail(op, "cache", "has no sketch", "a cache that was made with one");
}

void CheckCacheQueries(const char* op, const KVView& cache, const ConstTensorView& q) {
  using mechanism::Fail;
  mechanism::CheckFloat(op, "q", q);
  if (q.dtype() != cache.dtype) {
    Fail(op, "q", std::string("has dtype ") + Name(q.dtype()), std::string(Name(cache.dtype)) + " as the cache");
  }
  if (q.rank() != 4 || q.size(0) != cache.batch || q.size(3) != cache.dim || q.size(2) % cache.heads != 0) {
    Fail(op, "q", "has shape " + q.ShapeString(),
         std::string("[") + Text(cache.batch) + ",T,H," + Text(cache.dim) + "], H a multiple of " + Text(cache.heads));
  }
  mechanism::CheckContiguousRows(op, "q", q);
  const int64_t most = cache.appended.empty() ? 0 : *std::ranges::max_element(cache.appended);
  if (cache.batch > 0 && q.size(1) > most) {
    Fail(op, "q", "has " + Text(q.size(1)) + (q.size(1) == 1 ? " query" : " queries"),
         "at most " + Text(most) + ", the tokens that a sequence was given last");
  }
}

void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options, const Outputs& out,
            std::span<const int64_t> tree) {
  constexpr char kOp[] = "attention::Attend";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  Call call = AttendCall(kOp, cache, q, options, out, tree, Use::kForward);
  RefuseSlowPairs(kOp, ctx, call.p);
  if (cache.rotary != nullptr) return AttendRotated(ctx, cache, q, options, out);
  SumLogDecays(kOp, ctx, &call.p);
  softmax::Choose(kOp, ctx, call.p).forward(ctx, call.p);
}

Explanation ExplainAttend(const Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                          std::span<const int64_t> tree) {
  constexpr char kOp[] = "attention::ExplainAttend";
  const Call call = AttendCall(kOp, cache, q, options, {}, tree, Use::kExplain);
  const Problem& p = call.p;
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, p);
  double tokens = 0;
  for (const int64_t length : cache.lengths) tokens += static_cast<double>(length);
  const auto of_values = static_cast<double>(cache.key.begin == cache.value.begin ? 0 : cache.value_dim);
  Explanation e;
  e.kernel = kernel.name;
  e.target = kernel.target(ctx);
  e.why = Why(kernel, p);
  e.flops = 2 * static_cast<double>(p.depth + p.value_depth) * softmax::KeptPairs(p);
  const double factors = cache.quantized ? 2 * sizeof(float) : 0;
  const double row = static_cast<double>(ElementOf(cache)) * (static_cast<double>(cache.dim) + of_values) + factors;
  e.bytes = tokens * static_cast<double>(cache.heads) * row + static_cast<double>(SizeOf(cache.dtype)) *
                                                                  static_cast<double>(q.num_elements() / cache.dim) *
                                                                  static_cast<double>(cache.dim + cache.value_dim);
  e.workspace_bytes = kernel.workspace(ctx, p) * ctx.num_threads() + softmax::DecayBytes(p) + RotaryBytes(cache, q);
  e.visited_pairs = softmax::VisitedPairs(p, kernel.lanes(ctx, p), kernel.grid);
  e.invariant = kernel.invariant;
  return e;
}

Bound QuantizationBound(const Context&, const KVView& cache, const ConstTensorView& q, const Options& options) {
  constexpr char kOp[] = "attention::QuantizationBound";
  const Check check(kOp, Use::kForward);
  check.Present("q", q);
  if (!cache.quantized) check.Fail("cache", "is not quantised", "int8 rows");
  const Call call = AttendCall(kOp, cache, q, options, {}, {}, Use::kExplain);
  if (cache.rotary != nullptr) return RotatedBound(cache, q, options);
  const Problem& p = call.p;
  const auto largest = [&](const PageRows& scales, int64_t b, int64_t head) {
    float most = 0;
    for (int64_t t = 0; t < cache.lengths[static_cast<size_t>(b)]; ++t) {
      const std::byte* page = cache.pages[b][t / cache.page_tokens];
      most = std::max(most, *reinterpret_cast<const float*>(page + scales.begin + head * scales.head_stride +
                                                            t % cache.page_tokens * scales.token_stride));
    }
    return static_cast<double>(most);
  };
  Bound worst;
  for (int64_t b = 0; b < cache.batch; ++b) {
    for (int64_t head = 0; head < cache.heads; ++head) {
      double norm = 0;  // largest |q_i|_1
      for (int64_t i = 0; i < q.size(1); ++i) {
        for (int64_t h = head * p.group(); h < (head + 1) * p.group(); ++h) {
          const ConstTensorView row = q.Slice(0, b, b + 1).Slice(1, i, i + 1).Slice(2, h, h + 1);
          double sum = 0;
          for (int64_t e = 0; e < cache.dim; ++e) {
            sum += std::abs(LoadAsDouble(q.dtype(), row.data(), e * q.stride(3)));
          }
          norm = std::max(norm, sum);
        }
      }
      const double of_values = largest(cache.value_scale, b, head);
      const double delta = std::abs(p.scale) * norm * largest(cache.key_scale, b, head) / 2;
      worst.logit = std::max(worst.logit, delta);
      worst.output = std::max(worst.output, std::expm1(2 * delta) * kInt8Steps * of_values + of_values / 2);
    }
  }
  return worst;
}

}  // namespace heed::attention
