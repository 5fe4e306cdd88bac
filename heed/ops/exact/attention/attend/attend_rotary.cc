// Attend() over caches with rotary encoding.
//
// A cache that has rotated its keys by their positions needs rotated queries and is then like any other. A ring that
// rotates by index (ring_kv_cache.h has the formula) stores unrotated keys: its tokens are copied in order, rotated,
// and attended to by Forward().
//
// Index g in that order is token g < S, or token g + gap, for S sinks and gap evicted tokens between them and the
// window. The window is rotated by g and the query at p by p - gap, so their difference is that of the positions. A
// sink j must be at distance min(p, S + W - 1) - j from the query,
//
//   p - gap - turn(j) = min(p, S + W - 1) - j,  turn(j) = j + max(0, p - (S + W - 1)) - gap,
//
// which is j for the first row after an eviction and one more for each row that follows. So rows are attended to in
// groups for which all sinks have the same rotation: one group as long as nothing has been evicted, or without sinks;
// one group per row after that.
#include "heed/ops/exact/attention/attend/attend_rotary_internal.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/positions/rotary.h"

namespace heed::attention {
namespace {

using List = std::vector<int64_t>;

constexpr int64_t kLine = 64;
constexpr int64_t kBlockTokens = 64;  // tokens per task

int64_t Rounded(int64_t num_bytes) { return (num_bytes + kLine - 1) / kLine * kLine; }

// The contents of a ring, in order of tokens.
struct Kept {
  explicit Kept(const KVView& cache) : sinks(cache.sink_tokens) {
    for (size_t b = 0; b < static_cast<size_t>(cache.batch); ++b) {
      gap.push_back(std::max<int64_t>(0, cache.first_kept[b] - sinks));
      length.push_back(cache.lengths[b] - gap[b]);
      start.push_back(cache.lengths[b] - cache.appended[b] - gap[b]);
      longest = std::max(longest, length[b]);
    }
  }

  // The rotation of a sink for row i of sequence b, beyond the sink's index.
  int64_t SinkShift(const KVView& cache, size_t b, int64_t i) const {
    const int64_t position = start[b] + gap[b] + i;
    const int64_t after_sinks = std::max<int64_t>(0, position - sinks);
    return std::max<int64_t>(0, after_sinks - (cache.window - 1)) - gap[b];
  }

  int64_t sinks, longest = 0;
  List gap, length, start;  // [batch]; start: index of the first new row
};

struct Staging {
  TensorView q, k, rotated, v;
  int64_t num_bytes = 0;
};

Staging LayOut(const KVView& cache, const ConstTensorView& q, void* memory) {
  Staging s;
  const auto take = [&](int64_t tokens, int64_t heads, int64_t dim) {
    std::byte* const at = memory == nullptr ? nullptr : static_cast<std::byte*>(memory) + s.num_bytes;
    const TensorView view(at, cache.dtype, {cache.batch, tokens, heads, dim});
    s.num_bytes += Rounded(view.num_elements() * static_cast<int64_t>(SizeOf(cache.dtype)));
    return view;
  };
  s.q = take(q.size(1), q.size(2), cache.dim);
  if (!cache.rotated_in_cache) return s;
  const int64_t longest = Kept(cache).longest;
  s.k = take(longest, cache.heads, cache.dim);
  s.rotated = take(longest, cache.heads, cache.dim);
  s.v = take(longest, cache.heads, cache.value_dim);
  return s;
}

// Rotates row t of sequence b of x by first[b] + t.
void Rotate(Context& ctx, const CacheRotary& rotary, const ConstTensorView& x, const List& first, const TensorView& y) {
  const int64_t T = x.size(1);
  List positions;
  for (const int64_t p : first) {
    for (int64_t t = 0; t < T; ++t) positions.push_back(p + t);
  }
  Rotary(ctx, x, ConstTensorView(positions.data(), DType::kI64, {x.size(0), T}), rotary.pairs, rotary.options, y);
}

// Reserves the staging memory and fills its q.
Staging RotateQueries(Context& ctx, const KVView& cache, const ConstTensorView& q) {
  ctx.ReserveStaging(LayOut(cache, q, nullptr).num_bytes);
  const Staging s = LayOut(cache, q, ctx.Staging());
  List first;
  for (size_t b = 0; b < static_cast<size_t>(cache.batch); ++b) {
    first.push_back(cache.lengths[b] - cache.appended[b]);
  }
  if (cache.rotated_in_cache) first = Kept(cache).start;
  Rotate(ctx, *cache.rotary, q, first, s.q);
  return s;
}

KVView WithoutRotary(const KVView& cache) {
  KVView plain = cache;
  plain.rotary = nullptr;
  return plain;
}

// Copies the rows of one head each from pages into token order. Rows beyond a sequence's length are left as they are.
void Gather(Context& ctx, const KVView& cache, const Kept& kept, const PageRows& rows, const TensorView& to) {
  const auto size = static_cast<int64_t>(SizeOf(cache.dtype));
  const auto row_bytes = static_cast<size_t>(to.size(3) * size);
  const int64_t blocks = (kept.longest + kBlockTokens - 1) / kBlockTokens;
  ctx.ParallelFor(cache.batch * blocks, [&](int64_t task, int) {
    const auto b = static_cast<size_t>(task / blocks);
    const int64_t begin = task % blocks * kBlockTokens;
    const int64_t end = std::min(begin + kBlockTokens, kept.length[b]);
    for (int64_t place = begin; place < end; ++place) {
      const int64_t token = place < kept.sinks ? place : place + kept.gap[b];
      const std::byte* const from =
          cache.pages[b][token / cache.page_tokens] + rows.begin + token % cache.page_tokens * rows.token_stride;
      for (int64_t h = 0; h < cache.heads; ++h) {
        std::byte* const out =
            to.as<std::byte>() +
            (static_cast<int64_t>(b) * to.stride(0) + place * to.stride(1) + h * to.stride(2)) * size;
        std::memcpy(out, from + h * rows.head_stride, row_bytes);
      }
    }
  });
}

// Returns the end of the group of rows that begins with row i.
int64_t EndOfGroup(const KVView& cache, const Kept& kept, int64_t i, int64_t rows) {
  if (kept.sinks == 0) return rows;
  int64_t end = i + 1;
  const auto same = [&](int64_t row) {
    for (size_t b = 0; b < kept.gap.size(); ++b) {
      if (row >= cache.appended[b]) continue;  // beyond the appended rows
      if (kept.SinkShift(cache, b, row) != kept.SinkShift(cache, b, i)) return false;
    }
    return true;
  };
  while (end < rows && same(end)) ++end;
  return end;
}

void AttendInRing(Context& ctx, const KVView& cache, const Staging& s, const Options& options, const Outputs& out) {
  const Kept kept(cache);
  const CacheRotary& rotary = *cache.rotary;
  const int64_t B = cache.batch, rows = s.q.size(1);
  Gather(ctx, cache, kept, cache.key, s.k);
  Gather(ctx, cache, kept, cache.value, s.v);
  Rotate(ctx, rotary, s.k, List(kept.gap.size(), 0), s.rotated);
  const int64_t sinks = std::min(kept.sinks, kept.longest);

  for (int64_t i = 0, end; i < rows; i = end) {
    end = EndOfGroup(cache, kept, i, rows);
    List starts, queries, shifts;
    for (size_t b = 0; b < kept.gap.size(); ++b) {
      starts.push_back(kept.start[b] + i);
      queries.push_back(std::clamp<int64_t>(cache.appended[b] - i, 0, end - i));
      shifts.push_back(queries[b] > 0 ? kept.SinkShift(cache, b, i) : 0);
    }
    if (i > 0) Rotate(ctx, rotary, s.k.Slice(1, 0, sinks), shifts, s.rotated.Slice(1, 0, sinks));
    Options group = options;
    group.invariant = true;  // bitwise equal to other caches
    group.query_starts = ConstTensorView(starts.data(), DType::kI64, {B});
    group.query_lengths = ConstTensorView(queries.data(), DType::kI64, {B});
    group.key_lengths = ConstTensorView(kept.length.data(), DType::kI64, {B});
    Forward(ctx, {s.q.Slice(1, i, end), s.rotated, s.v}, group,
            {out.o.Slice(1, i, end), out.lse.present() ? out.lse.Slice(2, i, end) : TensorView()});
  }
}

}  // namespace

void CheckRotary(const Check& check, const KVView& cache, const Options& options, std::span<const int64_t> tree) {
  if (cache.rotary == nullptr) return;
  if (!tree.empty()) {
    check.Fail("tree", "is given", "none: the cache has rotated its keys in the order of appending");
  }
  if (!cache.rotated_in_cache) return;
  for (const OptionRow& row : kOptionRows) {
    if (row.Is(kByPlace) && IsGiven(row, options)) {
      check.Fail(row.name, "is given", "none: keys have no positions but in the ring");
    }
  }
  if (!options.causal) check.Fail("causal", "is false", "true");
  if (options.window.left < 0 || options.window.left >= cache.window) {
    check.Fail("window", "is " + Text(options.window.left) + " to the left",
               "0 to " + Text(cache.window - 1) + ", the window of the ring");
  }
}

int64_t RotaryBytes(const KVView& cache, const ConstTensorView& q) {
  return cache.rotary == nullptr ? 0 : LayOut(cache, q, nullptr).num_bytes;
}

void AttendRotated(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options,
                   const Outputs& out) {
  const Staging s = RotateQueries(ctx, cache, q);
  if (cache.rotated_in_cache) return AttendInRing(ctx, cache, s, options, out);
  Attend(ctx, WithoutRotary(cache), s.q, options, out);
}

ConstTensorView RotatedQueries(Context& ctx, const KVView& cache, const ConstTensorView& q) {
  return RotateQueries(ctx, cache, q).q;
}

Bound RotatedBound(const KVView& cache, const ConstTensorView& q, const Options& options) {
  Context ctx(1);
  return QuantizationBound(ctx, WithoutRotary(cache), RotateQueries(ctx, cache, q).q, options);
}

}  // namespace heed::attention
