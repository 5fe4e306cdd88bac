// Gathered rows: rows that are computed together because they keep the same tile, wherever they are in the sequence.
// This header says how a pass over a problem with lists by tile (TileRows) is divided.
#ifndef HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_H_
#define HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"

namespace heed::softmax {

// Consecutive blocks of rows of one key head. Only rows of one panel are gathered together, so that their states
// between tiles stay in cache. No bit depends on the size of panels.
struct Panel {
  int64_t sequence, key_head;
  int64_t first, end;  // blocks of the grid
};

// Returns the panels of a problem, each with `rows` rows or somewhat more.
std::vector<Panel> PanelsOf(const Problem& problem, int64_t lanes, bool fuse_heads, int64_t rows);

// Returns the number of rows of the largest panel.
int64_t MostRows(std::span<const Panel> panels, int64_t lanes);

// Returns how many rows a panel should have: enough that tiles fill blocks, few enough that every thread gets some and
// that `bytes` of each row stay in cache.
int64_t WantedRows(const Problem& problem, int num_threads, int64_t bytes);

// A row that keeps some keys of a tile.
template <size_t kWords>
struct GatheredRow {
  BlockGrid::Row row;
  int64_t slot;  // its place in the panel
  uint64_t words[kWords];
};

// Stores the rows of a panel that keep some of the keys [begin, begin + 64 kWords) in `to`, in the order of the grid,
// and returns their number. Queries of a head are gathered in groups of kTogether, counted from the first: all of a
// group if one of them keeps the tile.
template <size_t kWords, int64_t kTogether = 1>
size_t Gather(const Problem& p, const BlockGrid& grid, const Panel& panel, int64_t begin, GatheredRow<kWords>* to) {
  const Sequence& s = p.sequences[static_cast<size_t>(panel.sequence)];
  size_t count = 0;
  // Gathers queries of one head, the first of which has this slot.
  const auto gather = [&](int64_t head, int64_t first_query, int64_t end_query, int64_t first_slot) {
    std::span<const TileRows::Entry> lists[kWords];
    for (size_t i = 0; i < kWords; ++i) {
      const auto all = s.tile_rows->Of(s.kept_batch, panel.key_head * grid.heads + head, p.query_heads,
                                       begin / BlockSparseMask::kKeys + static_cast<int64_t>(i));
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

// Returns where the last block begins if gathered rows fill blocks of `lanes` rows, except that no row follows one
// whose partner in its group does not exist.
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

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_GATHERED_H_
