// Divides problems with tile lists per row into panels.
#include "heed/engines/softmax/forward/gathered.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace heed::softmax {

std::vector<Panel> PanelsOf(const Problem& p, int64_t lanes, bool fuse_heads, int64_t rows) {
  std::vector<Panel> panels;
  for (int64_t s = 0; s < std::ssize(p.sequences); ++s) {
    const BlockGrid grid(p, p.sequences[static_cast<size_t>(s)], lanes, fuse_heads);
    // The heads of a group alternate on the same queries, and their blocks stay in one panel; where heads share blocks,
    // all blocks of the key head do.
    const int64_t turns = grid.fused ? std::max<int64_t>(grid.blocks, 1) : grid.heads;
    const int64_t step = std::max<int64_t>(rows / (turns * lanes), 1) * turns;
    for (int64_t head = 0; head < p.key_heads; ++head) {
      for (int64_t first = 0; first < grid.blocks; first += step) {
        panels.push_back({s, head, first, std::min(first + step, grid.blocks)});
      }
    }
  }
  return panels;
}

int64_t MostRows(std::span<const Panel> panels, int64_t lanes) {
  int64_t most = 0;
  for (const Panel& panel : panels) most = std::max(most, (panel.end - panel.first) * lanes);
  return most;
}

int64_t WantedRows(const Problem& p, int num_threads, int64_t bytes) {
  constexpr int64_t kFewest = 512, kMost = 4096, kMostBytes = int64_t{4} << 20;
  int64_t all = 0;
  for (const Sequence& s : p.sequences) all += s.num_queries * p.query_heads;
  const int64_t most = std::clamp(kMostBytes / std::max<int64_t>(bytes, 1), kFewest, kMost);
  return std::clamp(all / (2 * num_threads), kFewest, most);
}

}  // namespace heed::softmax
