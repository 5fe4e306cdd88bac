// Rows that are computed together because they keep the same tile, wherever they stand: how a pass is cut where a
// problem has lists by tile (TileRows).
#ifndef HEED_ENGINES_SOFTMAX_GATHERED_H_
#define HEED_ENGINES_SOFTMAX_GATHERED_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"

namespace heed::softmax {

// Consecutive blocks of rows of a key head. Only rows of one panel are computed together: what is kept of them between
// tiles stays near. No bit depends on how large panels are.
struct Panel {
  int64_t sequence, key_head;
  int64_t first, end;  // blocks of the grid
};

// The panels of a problem, of `rows` rows or somewhat more each.
std::vector<Panel> PanelsOf(const Problem& problem, int64_t lanes, bool fuse_heads, int64_t rows);

// The rows of the largest panel.
int64_t MostRows(std::span<const Panel> panels, int64_t lanes);

// How many rows a panel should have: many enough for tiles to fill blocks, few enough for every thread to have some and
// for `bytes` of each row to stay in cache.
int64_t WantedRows(const Problem& problem, int num_threads, int64_t bytes);

// A row that keeps some of a tile.
template <size_t kWords>
struct GatheredRow {
  BlockGrid::Row row;
  int64_t slot;  // its place in the panel
  uint64_t words[kWords];
};

// Puts the rows of a panel that keep some of the keys [begin, begin + 64 kWords) into `to`, in the order of the grid;
// how many. `kTogether` queries of a head, counted from the first, come together: all of them where one keeps the tile.
template <size_t kWords, int64_t kTogether = 1>
size_t Gather(const Problem& p, const BlockGrid& grid, const Panel& panel, int64_t begin, GatheredRow<kWords>* to) {
  const Sequence& s = p.sequences[static_cast<size_t>(panel.sequence)];
  size_t count = 0;
  // Queries of a head, the first of which has this slot.
  const auto gather = [&](int64_t head, int64_t first_query, int64_t end_query, int64_t first_slot) {
    std::span<const TileRows::Entry> lists[kWords];
    for (size_t i = 0; i < kWords; ++i) {
      const auto all = s.tile_rows->Of(s.kept_batch, panel.key_head * grid.heads + head, p.query_heads,
                                       begin / Visits::kKeys + static_cast<int64_t>(i));
      const auto from = std::ranges::lower_bound(all, first_query, {}, &TileRows::Entry::row);
      lists[i] = std::span(from, all.end());
    }
    while (true) {
      int64_t query = end_query;
      for (const auto& list : lists) {
        if (!list.empty()) query = std::min<int64_t>(query, list[0].row);
      }
      if (query == end_query) return;
      query -= query % kTogether;
      for (const int64_t last = std::min(query + kTogether, end_query); query < last; ++query) {
        GatheredRow<kWords>& own = to[count++];
        own.row = {head, query};
        own.slot = first_slot + query - first_query;
        for (size_t i = 0; i < kWords; ++i) {
          const bool keeps = !lists[i].empty() && lists[i][0].row == query;
          own.words[i] = keeps ? s.tile_rows->WordOf(lists[i][0]) : 0;
          if (keeps) lists[i] = lists[i].subspan(1);
        }
      }
    }
  };
  if (grid.fused) {
    for (int64_t head = 0; head < grid.heads; ++head) {
      gather(head, 0, grid.num_queries, head * grid.num_queries);
    }
  } else if (grid.heads == 1) {
    gather(0, panel.first * grid.lanes, std::min(panel.end * grid.lanes, grid.num_queries), 0);
  } else {
    for (int64_t block = panel.first; block < panel.end; ++block) {
      const int64_t query = block / grid.heads * grid.lanes;
      gather(block % grid.heads, query, std::min(query + grid.lanes, grid.num_queries),
             (block - panel.first) * grid.lanes);
    }
  }
  return count;
}

// Where the last block begins if gathered rows fill blocks of so many lanes, but none behind one whose partner does not
// exist.
template <int64_t kTogether, size_t kWords>
size_t FirstOfLastBlock(std::span<const GatheredRow<kWords>> rows, size_t lanes) {
  size_t first = 0;
  for (size_t i = 1; i < rows.size(); ++i) {
    const bool full = i - first == lanes;
    const bool parted = rows[i].row.query % kTogether == 0 && static_cast<int64_t>(i - first) % kTogether != 0;
    if (full || parted) first = i;
  }
  return first;
}

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_GATHERED_H_
