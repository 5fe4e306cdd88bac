// The pairs that a pattern keeps, as cells of the page's maps.
#include "heed/pages/view_kept.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "heed/patterns/pattern_internal.h"

namespace heed::pages {
namespace {

struct Range {
  int64_t begin, end;
};

// The keys that a query at this position sees without a pattern.
Range Seen(const attention::Options& options, int64_t position, int64_t Tk) {
  const auto [left, right] = options.window;
  int64_t end = options.causal ? position + 1 : Tk;
  if (right >= 0) end = std::min(end, position + std::min(right, Tk) + 1);
  return {left < 0 ? 0 : std::max<int64_t>(0, position - left), std::min(end, Tk)};
}

// The bits of keys [begin, end) of a tile.
uint64_t BitsOf(int64_t begin, int64_t end) { return ~uint64_t{0} >> (patterns::kTile - (end - begin)) << begin; }

using Counts = std::vector<int64_t>;  // number of pairs per cell

// The cells of a map, and the cell of each pair.
struct Grid {
  int64_t rows, columns, Tq, Tk, start;  // position of query 0

  size_t size() const { return static_cast<size_t>(rows * columns); }
  bool exact() const { return rows == Tq && columns == Tk; }

  // Calls f(cell, begin, end) for keys [begin, end) of a row, cell by cell.
  template <class F>
  void ForCells(int64_t row, int64_t begin, int64_t end, const F& f) const {
    while (begin < end) {
      const int64_t column = begin * columns / Tk;
      const int64_t next = std::min(end, ((column + 1) * Tk + columns - 1) / columns);
      f(static_cast<size_t>(row * rows / Tq * columns + column), begin, next);
      begin = next;
    }
  }
};

Counts CountSeen(const Grid& grid, const attention::Options& options) {
  Counts counts(grid.size());
  for (int64_t row = 0; row < grid.Tq; ++row) {
    const Range seen = Seen(options, grid.start + row, grid.Tk);
    grid.ForCells(row, seen.begin, seen.end,
                  [&](size_t cell, int64_t begin, int64_t end) { counts[cell] += end - begin; });
  }
  return counts;
}

Counts CountKept(const Grid& grid, const attention::Options& options, const softmax::BlockSparseMask& mask,
                 int64_t head) {
  Counts counts(grid.size());
  for (int64_t row = 0; row < grid.Tq; ++row) {
    const Range seen = Seen(options, grid.start + row, grid.Tk);
    for (const softmax::MaskTile& entry : mask.Of(0, head, row)) {
      const int64_t first = entry.tile * patterns::kTile;
      const uint64_t word = mask.WordOf(entry, row);
      grid.ForCells(row, std::max(seen.begin, first), std::min(seen.end, first + patterns::kTile),
                    [&](size_t cell, int64_t begin, int64_t end) {
                      counts[cell] += std::popcount(word & BitsOf(begin - first, end - first));
                    });
    }
  }
  return counts;
}

// Appends the cells of one head.
void Append(const Grid& grid, const Counts& kept, const Counts& seen, std::vector<uint8_t>& bytes) {
  if (!grid.exact()) {
    for (size_t i = 0; i < grid.size(); ++i) {  // 255: all pairs, also if there are none; 0: no pair
      const int64_t least = kept[i] > 0 ? 1 : 0;
      bytes.push_back(seen[i] == 0 ? 255 : static_cast<uint8_t>(std::max(least, 255 * kept[i] / seen[i])));
    }
    return;
  }
  const size_t begin = bytes.size();
  bytes.resize(begin + (grid.size() + 7) / 8);
  for (size_t i = 0; i < grid.size(); ++i) {
    if (kept[i] > 0) bytes[begin + i / 8] |= static_cast<uint8_t>(1 << i % 8);
  }
}

double Sum(const Counts& counts) {
  double sum = 0;
  for (const int64_t count : counts) sum += static_cast<double>(count);
  return sum;
}

// The kept probability is a ratio of two sums of exponentials. All sequences are computed, since a pattern may have a
// set for each.
Json AttentionShares(Context& ctx, const ViewLayer& layer, const attention::Options& options, const Pattern& pattern) {
  attention::Options sparse = options;
  sparse.pattern = pattern;
  const Buffer all = LogSumExp(ctx, layer.q, layer.k, options), kept = LogSumExp(ctx, layer.q, layer.k, sparse);
  const int64_t heads = layer.q.size(2), Tq = layer.q.size(1);
  Json shares = Json::array();
  for (int64_t head = 0; head < heads; ++head) {
    double sum = 0, rows = 0;
    for (int64_t i = head * Tq; i < (head + 1) * Tq; ++i) {
      const double whole = LoadAsDouble(all.view().dtype(), all.view().data(), i);
      if (std::isinf(whole) && whole < 0) continue;  // the row sees no key
      sum += std::exp(LoadAsDouble(kept.view().dtype(), kept.view().data(), i) - whole);
      ++rows;
    }
    shares.push_back(sum / rows);
  }
  return shares;
}

}  // namespace

KeptSet KeptCells(Context& ctx, const ViewLayer& layer, const attention::Options& options, const Pattern& pattern,
                  int64_t rows, int64_t columns) {
  const int64_t Tq = layer.q.size(1), Tk = layer.k.size(1), heads = layer.q.size(2);
  const std::vector<int64_t> starts = Starts(layer);
  const Grid grid = {rows, columns, Tq, Tk, starts[0]};
  const PatternCall call = {Tq, Tk, heads, layer.k.size(2), {starts[0]}, 0, layer.q.size(0)};
  const auto mask = patterns::Compile(pattern, call);
  const Counts seen = CountSeen(grid, options);
  std::vector<uint8_t> bytes;
  Json pairs = Json::array();
  for (int64_t head = 0; head < mask->heads; ++head) {
    const Counts kept = CountKept(grid, options, *mask, head);
    Append(grid, kept, seen, bytes);
    pairs.push_back(Sum(kept) / Sum(seen));
  }
  while (static_cast<int64_t>(pairs.size()) < heads) pairs.push_back(pairs[0]);
  return {{{"bits", grid.exact() ? 1 : 8},
           {"heads", mask->heads},
           {"pairs", pairs},
           {"attention", AttentionShares(ctx, layer, options, pattern)}},
          bytes};
}

}  // namespace heed::pages
