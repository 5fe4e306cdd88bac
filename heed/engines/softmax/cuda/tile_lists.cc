// Tile lists and mask words of patterns and segments, as GPU kernels read them.
#include "heed/engines/softmax/cuda/tile_lists.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>

#include "heed/core/error.h"
#include "heed/engines/softmax/cuda/arguments.h"

namespace heed::softmax::cuda {
namespace {

constexpr int64_t kKeys = BlockSparseMask::kKeys, kRows = BlockSparseMask::kRows;

// Segment ids of up to 64 tokens, with their minimum and maximum; negative ids see nothing.
class Ids {
 public:
  Ids(std::span<const int32_t> all, int64_t first) : ids_(all.subspan(static_cast<size_t>(first))) {
    ids_ = ids_.first(std::min(ids_.size(), static_cast<size_t>(kKeys)));
    for (const int32_t id : ids_) {
      if (id < 0) continue;
      least_ = std::min(least_, id);
      most_ = std::max(most_, id);
    }
  }
  bool Meets(const Ids& other) const { return least_ <= other.most_ && other.least_ <= most_; }
  uint64_t EqualTo(int32_t id) const {
    uint64_t bits = 0;
    for (size_t i = 0; i < ids_.size(); ++i) bits |= uint64_t{id >= 0 && ids_[i] == id} << i;
    return bits;
  }
  uint64_t All() const { return ids_.empty() ? 0 : ~uint64_t{0} >> (kKeys - std::ssize(ids_)); }
  std::span<const int32_t> values() const { return ids_; }

 private:
  std::span<const int32_t> ids_;
  int32_t least_ = std::numeric_limits<int32_t>::max(), most_ = -1;
};

std::vector<Ids> Tiles(std::span<const int32_t> ids) {
  std::vector<Ids> tiles;
  for (int64_t first = 0; first < std::ssize(ids); first += kKeys) tiles.emplace_back(ids, first);
  return tiles;
}

// Concatenates tile lists.
class Builder {
 public:
  // Returns the place of batch entry `batch`, and appends the lists if they are new.
  TileLists::Place Add(const BlockSparseMask& mask, int64_t batch) {
    const auto [at, is_new] = known_.try_emplace(&mask, std::ssize(lists_.begins));
    if (is_new) Append(mask);
    const int64_t of_head = mask.blocks + 1, of_batch = mask.batch == 1 ? 0 : batch;
    return {at->second + of_batch * mask.heads * of_head, mask.heads == 1 ? 0 : of_head};
  }
  TileLists lists_;

 private:
  void Append(const BlockSparseMask& mask) {
    const size_t first = lists_.tiles.size();
    if (first + mask.tiles.size() > std::numeric_limits<int32_t>::max()) {
      throw Unsupported(std::string(kName) + " takes patterns of up to 2^31 tiles");
    }
    for (const int64_t begin : mask.begins)
      lists_.begins.push_back(static_cast<int32_t>(static_cast<int64_t>(first) + begin));
    for (const MaskTile& entry : mask.tiles) {
      lists_.tiles.push_back(
          {static_cast<int32_t>(entry.tile), entry.words < 0 ? ListedTile::kAll : WordsAt(mask, entry.words)});
    }
  }
  int32_t WordsAt(const BlockSparseMask& mask, int64_t first) {
    const uint64_t* words = mask.words.data() + first;
    const std::string_view bytes(reinterpret_cast<const char*>(words), kRows * sizeof(uint64_t));
    const auto [at, is_new] = words_.try_emplace(bytes, static_cast<int32_t>(std::ssize(lists_.words) / kRows));
    if (is_new) lists_.words.insert(lists_.words.end(), words, words + kRows);
    return at->second;
  }

  std::map<const BlockSparseMask*, int64_t> known_;
  std::unordered_map<std::string_view, int32_t> words_;  // its keys are views of masks that outlive this object
};

}  // namespace

bool HasListsByHead(const Problem& p) {
  return std::ranges::any_of(p.sequences, [](const Sequence& s) { return s.kept != nullptr && s.kept->heads > 1; });
}

BlockSparseMask SegmentMask(const Problem& p, const Sequence& s) {
  const auto ids_of = [&](const std::vector<int32_t>& ids, int64_t stride, int64_t count) {
    return std::span(ids).subspan(static_cast<size_t>(s.batch * stride), static_cast<size_t>(count));
  };
  const std::vector<Ids> rows = Tiles(ids_of(p.segments_q, p.segments_q_stride, s.num_queries));
  const std::vector<Ids> keys = Tiles(ids_of(p.segments_k, p.segments_k_stride, s.num_keys));
  BlockSparseMask mask;
  mask.heads = s.kept == nullptr ? 1 : s.kept->heads;
  mask.blocks = std::ssize(rows);
  for (int64_t head = 0; head < mask.heads; ++head) {
    for (int64_t block = 0; block < mask.blocks; ++block) {
      mask.begins.push_back(std::ssize(mask.tiles));
      const Ids& own = rows[static_cast<size_t>(block)];
      const auto add = [&](int64_t tile, const auto& kept_of) {
        const Ids& of_tile = keys[static_cast<size_t>(tile)];
        if (!own.Meets(of_tile)) return;
        uint64_t words[kRows] = {}, some = 0, missing = 0;
        for (size_t i = 0; i < own.values().size(); ++i) {
          words[i] = of_tile.EqualTo(own.values()[i]) & kept_of(block * kRows + static_cast<int64_t>(i));
          some |= words[i];
          missing |= words[i] ^ of_tile.All();
        }
        if (some == 0) return;
        mask.tiles.push_back({tile, missing == 0 ? -1 : std::ssize(mask.words)});
        if (missing != 0) mask.words.insert(mask.words.end(), words, words + kRows);
      };
      if (s.kept == nullptr) {
        for (int64_t tile = 0; tile < std::ssize(keys); ++tile) add(tile, [](int64_t) { return ~uint64_t{0}; });
      } else {
        for (const MaskTile& entry : s.kept->Of(s.kept_batch, head, block * kRows)) {
          add(entry.tile, [&](int64_t row) { return s.kept->WordOf(entry, row); });
        }
      }
    }
    mask.begins.push_back(std::ssize(mask.tiles));
  }
  return mask;
}

TileLists ListTiles(const Problem& p, std::span<const Sequence> sequences) {
  Builder builder;
  std::list<BlockSparseMask> of_segments;
  for (const Sequence& s : sequences) {
    const bool sees_some = s.num_queries > 0 && s.query_end > 0;
    TileLists::Place place;
    if (!p.segments_q.empty() && sees_some) {
      place = builder.Add(of_segments.emplace_back(SegmentMask(p, s)), 0);
    } else if (s.kept != nullptr && sees_some) {
      place = builder.Add(*s.kept, s.kept_batch);
    }
    builder.lists_.places.push_back(place);
  }
  return std::move(builder.lists_);
}

}  // namespace heed::softmax::cuda
