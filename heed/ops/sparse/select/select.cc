// Selectors of blocks and of an indexer's keys: checks, the passes over the scores, and the patterns of the selections.
#include "heed/ops/sparse/select/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend_internal.h"
#include "heed/ops/exact/attention/attend/attend_rotary_internal.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/select/select_internal.h"

namespace heed::select {
namespace {

using mechanism::Fail;
using patterns::Table;

// Block sizes and counts may have any values whose sums do not overflow.
constexpr int64_t kMost = int64_t{1} << 40;

void CheckSize(const char* op, const char* name, int64_t size, int64_t least) {
  if (size < least) Fail(op, name, "is " + std::to_string(size), std::to_string(least) + " or more");
}

// Checks q and k as attention does, with the keys as values.
softmax::Problem CheckedProblem(const char* op, const ConstTensorView& q, const ConstTensorView& k,
                                const attention::Options& options) {
  softmax::Problem p = attention::CheckedProblem(op, {q, k, k}, options, {}, attention::Use::kInputs);
  if (p.key_heads < 1) Fail(op, "k", "has shape " + k.ShapeString(), "a head or more");
  return p;
}

void CheckSizes(const char* op, const BlockOptions& options) {
  CheckSize(op, "block", options.block, 1);
  CheckSize(op, "sinks", options.sinks, 0);
  CheckSize(op, "local", options.local, 0);
}

// The block call of a problem.
BlockCall Posed(softmax::Problem problem, const ConstTensorView& q, const BlockOptions& options) {
  BlockCall c;
  c.problem = std::move(problem);
  c.Tq = q.size(1);
  c.block = std::min(options.block, kMost);
  c.sinks = std::min(options.sinks, kMost);
  c.local = std::min(options.local, kMost);
  c.causal = options.causal;
  c.by_head = options.share == Share::kHead;
  for (const softmax::Sequence& s : c.problem.sequences) {
    const int64_t first = s.key_begin / c.block;
    const bool empty = s.key_begin == s.key_end;
    c.first.push_back(first);
    c.blocks.push_back(empty ? 0 : (s.key_end + c.block - 1) / c.block - first);
    c.most_blocks = std::max(c.most_blocks, c.blocks.back());
  }
  return c;
}

BlockCall CheckedBlocks(const char* op, const ConstTensorView& q, const ConstTensorView& k,
                        const BlockOptions& options) {
  CheckSizes(op, options);
  attention::Options places;
  places.align = options.align;
  places.query_starts = options.query_starts;
  places.key_lengths = options.key_lengths;
  places.key_starts = options.key_starts;
  return Posed(CheckedProblem(op, q, k, places), q, options);
}

// The rows are those of the last append; positions and lengths, which the cache knows, are refused as options.
BlockCall CheckedBlocks(const char* op, const ConstTensorView& q, const KVView& cache, const BlockOptions& options) {
  CheckSizes(op, options);
  attention::CheckSketch(op, cache);
  if (options.block % SketchBlocks::kTokens != 0) {
    Fail(op, "block", "is " + std::to_string(options.block),
         "a multiple of the 64 keys that a sketch has statistics of");
  }
  const auto refuse = [&](const char* name, bool given) {
    if (given) Fail(op, name, "is given", "none: the cache knows it");
  };
  refuse("align", options.align != attention::Align::kBottomRight);
  refuse("query_starts", options.query_starts.present());
  refuse("key_lengths", options.key_lengths.present());
  attention::CheckCacheQueries(op, cache, q);
  const attention::Check check(op, attention::Use::kInputs);
  const std::vector<int64_t> starts = check.Integers("key_starts", options.key_starts, {cache.batch});

  softmax::Problem p;
  p.dtype = cache.dtype;
  p.query_heads = q.size(2);
  p.key_heads = cache.heads;
  p.depth = cache.dim;
  p.q = attention::RowsOf(q);
  p.scale = 1 / std::sqrt(static_cast<double>(cache.dim));
  for (size_t b = 0; b < static_cast<size_t>(cache.batch); ++b) {
    softmax::Sequence s;
    s.batch = static_cast<int64_t>(b);
    s.num_queries = s.query_end = q.size(1);
    s.num_keys = s.key_end = cache.lengths[b];
    s.start = cache.lengths[b] - cache.appended[b];
    if (!starts.empty()) s.key_begin = starts[b];
    if (s.key_begin < 0 || s.key_begin > s.key_end) {
      Fail(op, "key_starts", "contains " + std::to_string(s.key_begin), "0 to " + std::to_string(s.key_end));
    }
    p.sequences.push_back(s);
  }
  BlockCall c = Posed(std::move(p), q, options);
  c.cache = &cache;
  return c;
}

// Keys are a tensor or a cache.
template <class Keys>
BlockCall CheckedTop(const char* op, const ConstTensorView& q, const Keys& keys, const TopBlocksOptions& options) {
  CheckSize(op, "count", options.count, 1);
  BlockCall c = CheckedBlocks(op, q, keys, options);
  c.count = options.count;
  c.box = options.score == Score::kBox;
  return c;
}

template <class Keys>
BlockCall CheckedMass(const char* op, const ConstTensorView& q, const Keys& keys, const CumulativeOptions& options) {
  if (!(options.mass > 0 && options.mass <= 1)) {
    Fail(op, "mass", "is " + mechanism::Text(options.mass), "a share above 0, 1 at most");
  }
  BlockCall c = CheckedBlocks(op, q, keys, options);
  c.mass = options.mass;
  return c;
}

// The pattern that patterns::RowBlocks() and Keys() build of a table, without a copy of it.
Pattern Listed(const char* builder, Table index, int64_t block) {
  std::vector<patterns::Value> values;
  values.emplace_back(std::move(index));
  if (block > 0) values.emplace_back(block);
  return patterns::Build(builder, std::move(values));
}

// The call with rotated queries, for a cache that rotates its keys.
BlockCall Turned(Context& ctx, const ConstTensorView& q, BlockCall c) {
  if (c.cache->rotary != nullptr) c.problem.q = attention::RowsOf(attention::RotatedQueries(ctx, *c.cache, q));
  return c;
}

Pattern BestOf(Context& ctx, const BlockCall& c) {
  Table index = {{std::ssize(c.problem.sequences), c.Tq, c.heads(), MostKept(c)}, {}};
  index.values.resize(static_cast<size_t>(index.shape[0] * index.shape[1] * index.shape[2] * index.shape[3]));
  PassesFor(ctx, c.problem.dtype).top_blocks(ctx, c, MostKept(c), index.values.data());
  return Listed("row_blocks", std::move(index), c.block);
}

Pattern HoldingOf(Context& ctx, const BlockCall& c) {
  const int64_t words = (c.most_blocks + 63) / 64, rows = c.Tq * c.heads(), B = std::ssize(c.problem.sequences);
  std::vector<uint64_t> chosen(static_cast<size_t>(B * rows * words));
  PassesFor(ctx, c.problem.dtype).cumulative(ctx, c, words, chosen.data());
  const auto of_row = [&](int64_t row) { return chosen.data() + row * words; };
  int64_t width = 0;
  for (int64_t row = 0; row < B * rows; ++row) {
    int64_t kept = 0;
    for (int64_t w = 0; w < words; ++w) kept += std::popcount(of_row(row)[w]);
    width = std::max(width, kept);
  }
  Table index = {{B, c.Tq, c.heads(), width}, {}};
  index.values.assign(static_cast<size_t>(B * rows * width), -1);
  ctx.ParallelFor(B * rows, [&](int64_t row, int) {
    int64_t* end = index.values.data() + (row + 1) * width;  // fills from the end, so that -1 comes first
    for (int64_t w = words - 1; w >= 0; --w) {
      for (uint64_t bits = of_row(row)[w]; bits != 0;) {
        const int bit = 63 - std::countl_zero(bits);
        *--end = c.first[static_cast<size_t>(row / rows)] + w * 64 + bit;
        bits ^= uint64_t{1} << bit;
      }
    }
  });
  return Listed("row_blocks", std::move(index), c.block);
}

}  // namespace

int64_t MostKept(const BlockCall& c) {
  return std::min(c.most_blocks, std::min(c.count, kMost) + c.sinks + std::max<int64_t>(c.local, 1) - 1);
}

BlockCall Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k, const TopBlocksOptions& options) {
  return CheckedTop(op, q, k, options);
}
BlockCall Checked(const char* op, const ConstTensorView& q, const KVView& cache, const TopBlocksOptions& options) {
  return CheckedTop(op, q, cache, options);
}
BlockCall Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k,
                  const CumulativeOptions& options) {
  return CheckedMass(op, q, k, options);
}
BlockCall Checked(const char* op, const ConstTensorView& q, const KVView& cache, const CumulativeOptions& options) {
  return CheckedMass(op, q, cache, options);
}

IndexerCall Checked(const char* op, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& weights,
                    const IndexerOptions& options) {
  CheckSize(op, "count", options.count, 1);
  CheckSize(op, "ratio", options.ratio, 1);
  const auto check = [&](const char* name, const ConstTensorView& t, int rank, const char* shape) {
    mechanism::CheckFloat(op, name, t);
    if (t.rank() != rank) Fail(op, name, "has shape " + t.ShapeString(), shape);
    if (t.dtype() != q.dtype()) {
      Fail(op, name, std::string("has dtype ") + Name(t.dtype()), std::string(Name(q.dtype())) + " as q");
    }
  };
  check("q", q, 4, "[B, Tq, Hi, Di]");
  check("k", k, 3, "[B, Tk, Di]");
  check("weights", weights, 3, "[B, Tq, Hi]");
  IndexerCall c;
  c.dtype = q.dtype();
  c.B = q.size(0);
  c.Tq = q.size(1);
  c.heads = q.size(2);
  c.depth = q.size(3);
  c.Tk = k.size(1);
  c.count = options.count;
  c.causal = options.causal;
  c.ratio = options.ratio;
  if (c.causal && c.ratio > 1 && !options.start) {
    Fail(op, "start", "is absent", "the position of query 0, which the number of keys does not determine if ratio > 1");
  }
  c.start = options.start.value_or(c.Tk - c.Tq);
  constexpr int64_t kMostPosition = int64_t{1} << 60;
  if (c.start < -kMostPosition || c.start > kMostPosition) {
    Fail(op, "start", "is " + std::to_string(c.start), "a position of at most 2^60 either way");
  }
  if (c.depth < 1) Fail(op, "q", "has shape " + q.ShapeString(), "Di >= 1");
  const auto shape = [&](const char* name, const ConstTensorView& t, std::vector<int64_t> expected) {
    if (!std::ranges::equal(t.sizes(), expected)) Fail(op, name, "has shape " + t.ShapeString(), ShapeString(expected));
  };
  shape("k", k, {c.B, c.Tk, c.depth});
  shape("weights", weights, {c.B, c.Tq, c.heads});
  constexpr int64_t kMostKeys = (int64_t{1} << 31) - 1024;
  if (c.Tk > kMostKeys)
    Fail(op, "k", "has " + std::to_string(c.Tk) + " tokens", "at most " + std::to_string(kMostKeys));
  mechanism::CheckContiguousRows(op, "q", q);
  mechanism::CheckContiguousRows(op, "k", k);
  c.q = {q.data(), q.stride(0), q.stride(1), q.stride(2)};
  c.k = {k.data(), k.stride(0), k.stride(1), 0};
  c.weights = {weights.data(), weights.stride(0), weights.stride(1), weights.stride(2)};
  return c;
}

Pattern TopBlocks(Context& ctx, const ConstTensorView& q, const ConstTensorView& k, const TopBlocksOptions& options) {
  return BestOf(ctx, Checked("select::TopBlocks", q, k, options));
}
Pattern TopBlocks(Context& ctx, const ConstTensorView& q, const KVView& cache, const TopBlocksOptions& options) {
  return BestOf(ctx, Turned(ctx, q, Checked("select::TopBlocks", q, cache, options)));
}
Pattern Cumulative(Context& ctx, const ConstTensorView& q, const ConstTensorView& k, const CumulativeOptions& options) {
  return HoldingOf(ctx, Checked("select::Cumulative", q, k, options));
}
Pattern Cumulative(Context& ctx, const ConstTensorView& q, const KVView& cache, const CumulativeOptions& options) {
  return HoldingOf(ctx, Turned(ctx, q, Checked("select::Cumulative", q, cache, options)));
}

Pattern Indexer(Context& ctx, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& weights,
                const IndexerOptions& options) {
  const IndexerCall c = Checked("select::Indexer", q, k, weights, options);
  Table index = {{c.B, c.Tq, std::min(c.count, c.Tk)}, {}};
  index.values.resize(static_cast<size_t>(index.shape[0] * index.shape[1] * index.shape[2]));
  PassesFor(ctx, c.dtype).indexer(ctx, c, index.shape[2], index.values.data());
  return Listed("keys", std::move(index), 0);
}

}  // namespace heed::select
