// The block mask of a pattern as the engine reads it: tile lists, with bits for tiles that are kept in part.
//
// Tiles have 64 keys, counted from key 0; blocks have 64 rows, counted from row 0 of a call. For each block, the tiles
// of which some pair is kept are listed in ascending order, each with one word per row and one bit per key. A tile that
// is kept completely needs no words. Batch entries and heads with the same mask share their lists.
#ifndef HEED_ENGINES_SOFTMAX_BLOCK_MASK_H_
#define HEED_ENGINES_SOFTMAX_BLOCK_MASK_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace heed::softmax {

struct MaskTile {
  int64_t tile;
  int64_t words;  // index of the words of the block's rows; -1: every row keeps every key
};

struct BlockSparseMask {
  static constexpr int64_t kKeys = 64, kRows = 64;

  int64_t batch = 1, heads = 1;  // 1: shared by all
  int64_t blocks = 0;            // blocks of rows
  std::vector<int64_t> begins;   // [batch, heads, blocks + 1]: where each list begins in `tiles`
  std::vector<MaskTile> tiles;
  std::vector<uint64_t> words;

  // Returns the tile list of the block that has this row.
  std::span<const MaskTile> Of(int64_t b, int64_t head, int64_t row) const {
    const int64_t list = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : head);
    const auto at = static_cast<size_t>(list * (blocks + 1) + row / kRows);
    return std::span(tiles).subspan(static_cast<size_t>(begins[at]), static_cast<size_t>(begins[at + 1] - begins[at]));
  }
  // Returns whether the block that has this row lists a tile with some of the keys [begin, end).
  bool KeepsAny(int64_t b, int64_t head, int64_t row, int64_t begin, int64_t end) const {
    const std::span<const MaskTile> list = Of(b, head, row);
    const auto at = std::ranges::lower_bound(list, begin / kKeys, {}, &MaskTile::tile);
    return at != list.end() && at->tile * kKeys < end;
  }
  uint64_t WordOf(const MaskTile& entry, int64_t row) const {
    return entry.words < 0 ? ~uint64_t{0} : words[static_cast<size_t>(entry.words + row % kRows)];
  }
  int64_t bytes() const {
    return static_cast<int64_t>(begins.size() * sizeof(int64_t) + tiles.size() * sizeof(MaskTile) +
                                words.size() * sizeof(uint64_t));
  }
};

// The block mask by tile: which rows keep some of each tile. It is for patterns in which neighbouring rows keep
// different tiles; rows that keep a tile are computed together, wherever they are.
struct TileRows {
  int64_t batch = 1, heads = 1;  // 1: shared by all; `heads` divides the query heads
  int64_t tiles = 0;
  std::vector<int64_t> begins;  // [batch, heads, tiles + 1]
  struct Entry {
    int32_t row;
    int32_t word;  // index of the row's word; -1: it keeps all keys
  };
  std::vector<Entry> entries;  // of each tile, by ascending row
  std::vector<uint64_t> words;

  std::span<const Entry> Of(int64_t b, int64_t head, int64_t query_heads, int64_t tile) const {
    if (tile < 0 || tile >= tiles) return {};
    const int64_t list = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : head / (query_heads / heads));
    const auto at = static_cast<size_t>(list * (tiles + 1) + tile);
    return std::span(entries).subspan(static_cast<size_t>(begins[at]),
                                      static_cast<size_t>(begins[at + 1] - begins[at]));
  }
  uint64_t WordOf(const Entry& entry) const {
    return entry.word < 0 ? ~uint64_t{0} : words[static_cast<size_t>(entry.word)];
  }
};

// Passes over the lists of up to kMost rows, tile by tile.
template <size_t kMost>
class KeptKeys {
 public:
  struct Row {
    const BlockSparseMask* mask;  // null: all is kept
    int64_t batch, head, row;
  };

  // Begins with tiles that have keys from `key` on. row_of(lane) is the row of a lane.
  template <class F>
  void Begin(size_t num_rows, int64_t key, const F& row_of) {
    num_lists_ = 0;
    for (size_t lane = 0; lane < num_rows; ++lane) {
      const Row row = row_of(lane);
      if (num_lists_ > 0 && lists_[num_lists_ - 1].Takes(row)) {
        ++lists_[num_lists_ - 1].count;
        continue;
      }
      List& list = lists_[num_lists_++] = {row, lane, 1, {}};
      if (row.mask == nullptr) continue;
      list.left = row.mask->Of(row.batch, row.head, row.row);
      Drop(list, key / BlockSparseMask::kKeys);
    }
  }

  // Returns the first key from `key` on that some row may keep, and drops all tiles before `key`.
  int64_t Next(int64_t key) {
    int64_t next = INT64_MAX;
    for (size_t i = 0; i < num_lists_; ++i) {
      List& list = lists_[i];
      if (list.row.mask == nullptr) return key;
      Drop(list, key / BlockSparseMask::kKeys);
      if (!list.left.empty()) next = std::min(next, list.left[0].tile * BlockSparseMask::kKeys);
    }
    return std::max(next, key);
  }

  // Returns whether every row keeps all of the keys [key, key + 64), as far as whole tiles tell. Drops no tile.
  bool KeepsAll(int64_t key) const {
    const int64_t tile = key / BlockSparseMask::kKeys;
    if (key % BlockSparseMask::kKeys != 0) return false;
    for (size_t i = 0; i < num_lists_; ++i) {
      const List& list = lists_[i];
      if (list.row.mask == nullptr) continue;
      const auto at = std::ranges::find_if(list.left, [&](const MaskTile& entry) { return entry.tile >= tile; });
      if (at == list.left.end() || at->tile != tile || at->words >= 0) return false;
    }
    return true;
  }

  // Calls put(lane, bits) with the bits of keys [key, key + 64), lowest first; some of these keys may not exist.
  template <class F>
  void Words(int64_t key, const F& put) {
    const int64_t tile = key / BlockSparseMask::kKeys;
    const int shift = static_cast<int>(key % BlockSparseMask::kKeys);
    for (size_t i = 0; i < num_lists_; ++i) {
      List& list = lists_[i];
      const BlockSparseMask* mask = list.row.mask;
      const MaskTile *low = nullptr, *high = nullptr;
      if (mask != nullptr) {
        Drop(list, tile);
        for (const MaskTile& entry : list.left.first(std::min<size_t>(list.left.size(), 2))) {
          if (entry.tile == tile) low = &entry;
          if (entry.tile == tile + 1 && shift > 0) high = &entry;
        }
      }
      for (size_t lane = 0; lane < list.count; ++lane) {
        const int64_t row = list.row.row + static_cast<int64_t>(lane);
        uint64_t bits = mask == nullptr ? ~uint64_t{0} : 0;
        if (low != nullptr) bits |= mask->WordOf(*low, row) >> shift;
        if (high != nullptr) bits |= mask->WordOf(*high, row) << (64 - shift);
        put(list.first + lane, bits);
      }
    }
  }

 private:
  // Consecutive rows with the same list.
  struct List {
    Row row;  // the first row
    size_t first, count;
    std::span<const MaskTile> left;

    bool Takes(const Row& next) const {
      return next.mask == row.mask && (row.mask == nullptr || (next.batch == row.batch && next.head == row.head &&
                                                               next.row == row.row + static_cast<int64_t>(count) &&
                                                               next.row % BlockSparseMask::kRows != 0));
    }
  };

  static void Drop(List& list, int64_t tile) {
    if (list.left.empty() || list.left[0].tile >= tile) return;
    const auto first = std::ranges::lower_bound(list.left, tile, {}, &MaskTile::tile);
    list.left = std::span(first, list.left.end());
  }

  std::array<List, kMost> lists_;
  size_t num_lists_ = 0;
};

}  // namespace heed::softmax

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_MASK_H_
