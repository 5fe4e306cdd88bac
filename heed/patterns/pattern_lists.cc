// Lists for the engine, compiled from a pattern: the tiles of each block of rows, or the rows of each tile.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/pattern_nodes_internal.h"

namespace heed::patterns {
namespace {

using softmax::TileRows;
using softmax::BlockSparseMask;

BlockSparseMask CompileAll(const Node& node, const PatternCall& call) {
  const bool same_starts = std::ranges::all_of(call.starts, [&](int64_t x) { return x == call.starts[0]; });
  const auto entries = static_cast<int64_t>(call.starts.size());
  BlockSparseMask mask;
  mask.batch = entries > 0 && same_starts && !node.by_batch() ? 1 : entries;
  mask.heads = node.by_head() ? call.query_heads : 1;
  mask.blocks = (call.Tq + kBlockRows - 1) / kBlockRows;
  Drawn drawn;
  for (int64_t b = 0; b < mask.batch; ++b) {
    for (int64_t head = 0; head < mask.heads; ++head) {
      const Place place = {call.batch + b, head, call.query_heads, call.key_heads, call.Tk, &drawn};
      for (int64_t row = 0; row < call.Tq; row += kBlockRows) {
        mask.begins.push_back(static_cast<int64_t>(mask.tiles.size()));
        const RowRange rows = {row, call.starts[static_cast<size_t>(b)] + row, std::min(kBlockRows, call.Tq - row)};
        TileSet tiles(call.Tk);
        node.Tiles(place, rows, tiles);
        for (const TileSet::Range& range : tiles.Ranges()) {
          for (int64_t tile = range.begin; tile < range.end; ++tile) {
            const int64_t begin = tile * kTile, end = std::min(begin + kTile, call.Tk);
            const Share share = node.ShareOf(place, rows, begin, end);
            if (share == Share::kNone) continue;
            uint64_t words[kBlockRows] = {}, some = 0, missing = 0;
            if (share == Share::kSome) {
              const uint64_t valid = ~uint64_t{0} >> (begin + kTile - end);
              node.Words(place, rows, begin, words);
              for (int64_t i = 0; i < rows.count; ++i) {
                some |= words[i] &= valid;
                missing |= words[i] ^ valid;
              }
              if (some == 0) continue;
            }
            const auto at = static_cast<int64_t>(mask.words.size());
            mask.tiles.push_back({tile, missing == 0 ? -1 : at});
            if (missing != 0) mask.words.insert(mask.words.end(), words, words + kBlockRows);
          }
        }
      }
      mask.begins.push_back(static_cast<int64_t>(mask.tiles.size()));
    }
  }
  return mask;
}

// Calls f(tile, bits of its keys) for the tiles that a row's blocks fall into, ascending.
template <class F>
void ForTiles(std::span<const int64_t> blocks, int64_t block_keys, int64_t Tk, const F& f) {
  int64_t tile = -1;
  uint64_t bits = 0;
  for (const int64_t block : blocks) {
    const int64_t end = std::min((block + 1) * block_keys, Tk);
    for (int64_t key = block * block_keys; key < end;) {
      const int64_t own = key / kTile, until = std::min(end, (own + 1) * kTile);
      if (own != tile && tile >= 0) f(tile, bits);
      bits = (own == tile ? bits : 0) | Bits(key, until, own * kTile);
      tile = own;
      key = until;
    }
  }
  if (tile >= 0) f(tile, bits);
}

TileRows TileRowsOf(const Node& node, const PatternCall& call) {
  TileRows lists;
  lists.batch = std::ssize(call.starts);
  lists.heads = node.listed_heads();
  lists.tiles = (call.Tk + kTile - 1) / kTile;
  const int64_t block = node.listed_block();
  const auto for_tiles = [&](int64_t b, int64_t head, int64_t row, const auto& f) {
    const Place place = {call.batch + b, head * (call.query_heads / lists.heads), call.query_heads, call.key_heads,
                         call.Tk};
    const std::span<const int64_t> blocks = node.Listed(place, row, 0, call.Tk);
    if (block != kTile) return ForTiles(blocks, block, call.Tk, f);
    for (const int64_t tile : blocks) f(tile, kAllKeys);  // the usual case, in a third of the time
  };
  std::vector<int64_t> next(static_cast<size_t>(lists.tiles));
  lists.begins.reserve(static_cast<size_t>(lists.batch * lists.heads * (lists.tiles + 1)));
  for (int64_t b = 0; b < lists.batch; ++b) {
    for (int64_t head = 0; head < lists.heads; ++head) {
      std::ranges::fill(next, 0);
      for (int64_t row = 0; row < call.Tq; ++row) {
        for_tiles(b, head, row, [&](int64_t tile, uint64_t) { ++next[static_cast<size_t>(tile)]; });
      }
      auto at = std::ssize(lists.entries);
      for (int64_t& count : next) {
        lists.begins.push_back(at);
        at += std::exchange(count, at);
      }
      lists.begins.push_back(at);
      lists.entries.resize(static_cast<size_t>(at));
      for (int64_t row = 0; row < call.Tq; ++row) {
        for_tiles(b, head, row, [&](int64_t tile, uint64_t bits) {
          const int64_t beyond = std::max<int64_t>((tile + 1) * kTile - call.Tk, 0);
          const bool whole = (bits | ~(kAllKeys >> beyond)) == kAllKeys;
          const auto word = whole ? -1 : static_cast<int32_t>(lists.words.size());
          if (!whole) lists.words.push_back(bits);
          lists.entries[static_cast<size_t>(next[static_cast<size_t>(tile)]++)] = {static_cast<int32_t>(row), word};
        });
      }
    }
  }
  return lists;
}

// True if computing rows tile by tile is faster than computing blocks of rows with all tiles that some row keeps.
// Loading and storing a row's accumulators for each of its tiles costs about a third of computing it.
bool PaysByTile(const TileRows& lists) {
  int64_t in_blocks = 0;
  for (size_t list = 0; list + 1 < lists.begins.size(); ++list) {
    int64_t last = -1;
    for (int64_t at = lists.begins[list]; at < lists.begins[list + 1]; ++at) {
      const int64_t block = lists.entries[static_cast<size_t>(at)].row / kBlockRows;
      in_blocks += block != last ? kBlockRows : 0;
      last = block;
    }
  }
  return 4 * std::ssize(lists.entries) < 3 * in_blocks;
}

int64_t BytesOf(const BlockSparseMask& mask) { return mask.bytes(); }
int64_t BytesOf(const TileRows& lists) {
  return static_cast<int64_t>(lists.begins.size() * sizeof(int64_t) + lists.entries.size() * sizeof(TileRows::Entry) +
                              lists.words.size() * sizeof(uint64_t));
}

// Recently compiled lists, newest first. Never blocks: a thread that finds it locked compiles for itself, as does a
// child of fork() whose parent held the lock.
template <class Lists>
class Recent {
 public:
  std::shared_ptr<const Lists> Find(const std::string& key) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return nullptr;
    for (auto at = entries_.begin(); at != entries_.end(); ++at) {
      if (at->key != key) continue;
      entries_.splice(entries_.begin(), entries_, at);
      return at->lists;
    }
    return nullptr;
  }
  void Add(const std::string& key, std::shared_ptr<const Lists> lists) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || BytesOf(*lists) > kMostBytes) return;
    bytes_ += BytesOf(*lists);
    entries_.push_front({key, std::move(lists)});
    while (entries_.size() > kMost || bytes_ > kMostBytes) {
      bytes_ -= BytesOf(*entries_.back().lists);
      entries_.pop_back();
    }
  }

 private:
  static constexpr size_t kMost = 32;
  static constexpr int64_t kMostBytes = int64_t{64} << 20;
  struct Entry {
    std::string key;
    std::shared_ptr<const Lists> lists;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
  int64_t bytes_ = 0;
};

// Returns make()'s lists of a pattern for a call, from the cache if they were compiled recently.
template <class Lists, class F>
std::shared_ptr<const Lists> Compiled(const Pattern& pattern, const PatternCall& call, const F& make) {
  static auto& recent = *new Recent<Lists>;  // never destroyed: threads may outlive static objects
  std::string key = pattern.node()->key;
  for (const int64_t x : {call.Tq, call.Tk, call.query_heads, call.key_heads, call.batch}) {
    key += ' ';
    key += std::to_string(x);
  }
  for (const int64_t start : call.starts) {
    key += ' ';
    key += std::to_string(start);
  }
  if (auto found = recent.Find(key)) return found;
  auto lists = std::make_shared<const Lists>(make(*pattern.node(), call));
  recent.Add(key, lists);
  return lists;
}

}  // namespace

std::shared_ptr<const BlockSparseMask> Compile(const Pattern& pattern, const PatternCall& call) {
  return Compiled<BlockSparseMask>(pattern, call, &CompileAll);
}

std::shared_ptr<const TileRows> CompileTileRows(const Pattern& pattern, const PatternCall& call) {
  auto lists = Compiled<TileRows>(pattern, call, &TileRowsOf);
  return PaysByTile(*lists) ? lists : nullptr;
}

}  // namespace heed::patterns
