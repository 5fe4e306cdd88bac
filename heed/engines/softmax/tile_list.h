// The keys that a query sees, and the tiles that a block of queries computes (its tile list).
//
// All masks but segments and the boolean mask are intervals of keys, so that a row sees at most two runs of keys: the
// sink tokens that a window keeps, and the rest. A block of rows computes the tiles that the union of its rows' runs
// touches, clipped to this union. A tile inside every row's runs is full and needs no mask.
//
// Tiles are on a grid counted from the sequence's first valid key, and a block computes a tile at most once. States are
// rescaled only at the boundaries of this grid, which keeps a row's bits independent of its block.
#ifndef HEED_ENGINES_SOFTMAX_TILE_LIST_H_
#define HEED_ENGINES_SOFTMAX_TILE_LIST_H_

#include <algorithm>
#include <cstdint>
#include <span>

#include "heed/engines/softmax/key_runs.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax {

inline constexpr int64_t kTileKeys = 64;      // a kernel may have another size
inline constexpr int64_t kSegmentKeys = 512;  // each segment has one un-normalised state

// A kernel's division of the keys of a sequence, counted from the first valid key. Tile sizes are powers of two up to a
// segment. Tiles are extended to whole steps of keys as far as there are valid keys.
struct KeyGrid {
  int64_t tile = kTileKeys;
  int64_t step = 1;  // a power of two
  int64_t segment = kSegmentKeys;
};

// Returns the keys that one row sees.
KeyRuns VisibleKeys(const Problem& problem, const Sequence& sequence, int64_t query);

struct Tile {
  Interval keys;
  int64_t grid = 0;     // start of the tile on the grid, seen or not
  int64_t segment = 0;  // index of its segment
  int64_t until = 0;    // end of the run of visible keys that the tile is in
  bool full = false;    // every row of the block sees all of its keys
};

// Enumerates the tiles of one block of rows in ascending order.
class TileList {
 public:
  TileList() = default;
  TileList(const Sequence& sequence, std::span<const KeyRuns> rows, const KeyGrid& grid = {});

  bool Next(Tile* tile) {
    if (at_ >= first_.end) at_ = std::max(at_, second_.begin);
    const bool in_first = at_ < first_.end;
    const int64_t limit = in_first ? first_.end : second_.end;
    if (at_ >= limit) return false;
    // Masks instead of divisions, because a short tile takes no longer than ten divisions.
    const int64_t boundary = at_ - ((at_ - origin_) & (tile_ - 1)) + tile_;
    int64_t end = std::min(boundary, limit);
    if (in_first && end < boundary && second_.begin < boundary) {
      end = std::min(boundary, std::max(end, second_.end));  // both runs are in one tile
    }
    tile->keys = {at_ - ((at_ - origin_) & (step_ - 1)), std::min(end + ((origin_ - end) & (step_ - 1)), end_)};
    tile->grid = boundary - tile_;
    tile->segment = (at_ - origin_) / segment_;
    tile->full = common_first_.Contains(tile->keys) || common_second_.Contains(tile->keys);
    tile->until = limit;
    at_ = end;
    return true;
  }

  int64_t at() const { return at_; }  // start of the next tile

  // Skips the tiles that end before this key.
  void SkipTo(int64_t key) { at_ = std::max(at_, key - ((key - origin_) & (tile_ - 1))); }

 private:
  int64_t tile_ = kTileKeys, step_ = 1, segment_ = kSegmentKeys;
  int64_t origin_ = 0, end_ = 0, at_ = 0;
  Interval first_, second_;                // unions over the rows
  Interval common_first_, common_second_;  // intersections
};

// The groups of keys that a block of rows may see, where one task owns the gradients of a group. Their number and order
// depend only on the problem's intervals, not on masks. Groups are counted from the first valid key.
class VisibleGroups {
 public:
  VisibleGroups(const Sequence& sequence, std::span<const KeyRuns> rows, int64_t group_keys);

  bool Contains(int64_t group) const {
    return (first_.begin <= group && group < first_.end) || (second_.begin <= group && group < second_.end);
  }
  int64_t NumBefore(int64_t group) const {
    const auto before = [group](const Interval& groups) {
      return std::clamp<int64_t>(group - groups.begin, 0, groups.size());
    };
    return before(first_) + before(second_);
  }

 private:
  Interval first_, second_;  // group indices, disjoint
};

inline int64_t NumGroups(const Sequence& sequence, int64_t group_keys) {
  return (sequence.key_end - sequence.key_begin + group_keys - 1) / group_keys;
}

// Divides query rows into blocks. Where a head has fewer queries than a block has lanes, the heads of a group, which
// see the same keys, share blocks.
struct BlockGrid {
  BlockGrid(const Problem& problem, const Sequence& sequence, int64_t lanes, bool fuse_heads = true);

  struct Row {
    int64_t head;  // in the group
    int64_t query;
  };
  // A grid of one block with these rows, at least one.
  BlockGrid(const Problem& problem, std::span<const Row> rows);

  int64_t blocks;  // per key head
  int64_t lanes;   // rows of one block at most
  int64_t num_queries;
  int64_t heads;  // of one group
  bool fused;
  std::span<const Row> chosen;  // the rows of the one block; else empty

  int64_t NumRows(int64_t block) const;
  // If heads do not share blocks, the heads of a group alternate on the same queries, so that they find the same keys
  // in the cache.
  Row At(int64_t block, int64_t lane) const {
    if (!chosen.empty()) return chosen[static_cast<size_t>(lane)];
    if (fused) {
      const int64_t row = block * lanes + lane;
      return {row / num_queries, row % num_queries};
    }
    return {block % heads, block / heads * lanes + lane};
  }

  struct Place {
    int64_t block, lane;
  };
  Place Find(const Row& row) const {  // the inverse of At(), without chosen rows
    if (fused) {
      const int64_t i = row.head * num_queries + row.query;
      return {i / lanes, i % lanes};
    }
    return {row.query / lanes * heads + row.head, row.query % lanes};
  }
};

// The part of a tile that the boolean mask and segments leave to a block of rows. Empty tiles are not computed.
enum class Cover { kNone, kSome, kAll };
Cover CoverOf(const Problem& problem, const Sequence& sequence, const BlockGrid& grid, int64_t block, int64_t key_head,
              const Interval& keys);

// Returns the number of pairs that a kernel with `lanes` rows per block computes, over all heads.
double VisitedPairs(const Problem& problem, int64_t lanes, const KeyGrid& grid = {});

// Returns the number of pairs that are kept, over all heads. Masks and segments without data count as kept.
double KeptPairs(const Problem& problem);

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_TILE_LIST_H_
