// Intervals of visible keys, blocks of rows, and the number of pairs that they have.
#include "heed/engines/softmax/tile_list.h"

#include <bit>
#include <vector>

namespace heed::softmax {
namespace {

void Unite(Interval* all, const Interval& one) {
  if (one.empty()) return;
  *all = all->empty() ? one : Interval{std::min(all->begin, one.begin), std::max(all->end, one.end)};
}

}  // namespace

KeyRuns VisibleKeys(const Problem& p, const Sequence& s, int64_t query) { return KeyRunsOf(p, s, query); }

TileList::TileList(const Sequence& s, std::span<const KeyRuns> rows, const KeyGrid& grid)
    : tile_(grid.tile), step_(grid.step), segment_(grid.segment), origin_(s.key_begin), end_(s.key_end) {
  for (const KeyRuns& row : rows) {
    Unite(&first_, row.first);
    Unite(&second_, row.second);
  }
  if (first_.empty()) first_ = {};
  if (second_.empty()) second_ = {};
  if (!rows.empty()) {
    common_first_ = rows[0].first;
    common_second_ = rows[0].second;
    for (const KeyRuns& row : rows) {
      common_first_ = Intersect(common_first_, row.first);
      common_second_ = Intersect(common_second_, row.second);
    }
  }
  // A row whose two runs met has everything in second_, which may begin before first_.
  if (!first_.empty() && !second_.empty() && second_.begin <= first_.end) {
    second_ = {std::min(first_.begin, second_.begin), std::max(first_.end, second_.end)};
    first_ = {};
  }
  at_ = first_.empty() ? second_.begin : first_.begin;
}

VisibleGroups::VisibleGroups(const Sequence& s, std::span<const KeyRuns> rows, int64_t group_keys) {
  for (const KeyRuns& row : rows) {
    Unite(&first_, row.first);
    Unite(&second_, row.second);
  }
  const auto groups_of = [&](const Interval& keys) {
    if (keys.empty()) return Interval();
    return Interval{(keys.begin - s.key_begin) / group_keys, (keys.end - 1 - s.key_begin) / group_keys + 1};
  };
  first_ = groups_of(first_);
  second_ = groups_of(second_);
  if (first_.empty()) first_ = {};
  if (second_.empty()) second_ = {};
  if (!first_.empty() && !second_.empty() && second_.begin < first_.end) {
    Unite(&second_, first_);
    first_ = {};
  }
}

BlockGrid::BlockGrid(const Problem& problem, const Sequence& sequence, int64_t lanes_per_block, bool fuse_heads)
    : lanes(lanes_per_block), num_queries(sequence.num_queries), heads(problem.group()),
      fused(fuse_heads && sequence.num_queries < lanes_per_block) {
  blocks = fused ? (num_queries * heads + lanes - 1) / lanes : heads * ((num_queries + lanes - 1) / lanes);
}

BlockGrid::BlockGrid(const Problem& problem, std::span<const Row> rows)
    : blocks(1), lanes(static_cast<int64_t>(rows.size())), num_queries(lanes), heads(problem.group()), fused(false),
      chosen(rows) {}

int64_t BlockGrid::NumRows(int64_t block) const {
  if (!chosen.empty()) return lanes;
  if (fused) return std::min(lanes, num_queries * heads - block * lanes);
  return std::min(lanes, num_queries - block / heads * lanes);
}

Cover CoverOf(const Problem& p, const Sequence& s, const BlockGrid& grid, int64_t block, int64_t key_head,
              const Interval& keys) {
  Cover cover = Cover::kAll;
  const int64_t num_rows = grid.NumRows(block);
  if (!p.segments_q.empty()) {
    const int32_t* q = p.segments_q.data() + s.batch * p.segments_q_stride + s.first_q;
    const int32_t* k = p.segments_k.data() + s.batch * p.segments_k_stride;
    const auto [k_min, k_max] = std::minmax_element(k + keys.begin, k + keys.end);
    int32_t q_min = q[grid.At(block, 0).query], q_max = q_min;
    for (int64_t lane = 1; lane < num_rows; ++lane) {
      const int32_t id = q[grid.At(block, lane).query];
      q_min = std::min(q_min, id);
      q_max = std::max(q_max, id);
    }
    if (*k_max < std::max(q_min, 0) || *k_min > q_max) return Cover::kNone;
    if (q_min < 0 || q_min != q_max || *k_min != q_min || *k_max != q_max) {
      cover = Cover::kSome;
    }
  }
  if (p.mask.data != nullptr) {
    const auto* mask = static_cast<const uint8_t*>(p.mask.data);
    int64_t kept = 0, seen = 0;
    const uint8_t* last = nullptr;
    for (int64_t lane = 0; lane < num_rows; ++lane) {
      const BlockGrid::Row row = grid.At(block, lane);
      const uint8_t* at = mask + s.batch * p.mask.batch_stride +
                          (key_head * grid.heads + row.head) * p.mask.head_stride +
                          (s.first_q + row.query) * p.mask.query_stride + keys.begin * p.mask.key_stride;
      if (at == last) continue;  // the mask is broadcast over queries
      last = at;
      for (int64_t j = 0; j < keys.size(); ++j) {
        kept += at[j * p.mask.key_stride] != 0;
      }
      seen += keys.size();
    }
    if (kept == 0) return Cover::kNone;
    if (kept != seen) cover = Cover::kSome;
  }
  return cover;
}

namespace {

// Returns how many of these keys a pattern keeps for a row.
int64_t NumKept(const Sequence& s, int64_t head, int64_t query, const Interval& keys) {
  if (s.kept == nullptr || keys.empty()) return keys.size();
  int64_t count = 0;
  const std::span<const MaskTile> list = s.kept->Of(s.kept_batch, head, query);
  const auto first = std::ranges::lower_bound(list, keys.begin / BlockSparseMask::kKeys, {}, &MaskTile::tile);
  for (const MaskTile& entry : std::span(first, list.end())) {
    const int64_t begin = entry.tile * BlockSparseMask::kKeys;
    if (begin >= keys.end) break;
    const Interval own = Intersect(keys, {begin, begin + BlockSparseMask::kKeys});
    const uint64_t bits = s.kept->WordOf(entry, query) >> (own.begin - begin);
    count += std::popcount(bits << (BlockSparseMask::kKeys - own.size()));
  }
  return count;
}

// Calls f(bits of the keys that are kept and visible) for each row that keeps and sees some of a tile.
template <class F>
void ForTileRows(const Problem& p, const Sequence& s, const F& f) {
  for (int64_t head = 0; head < p.query_heads; ++head) {
    for (int64_t tile = 0; tile < s.tile_rows->tiles; ++tile) {
      for (const TileRows::Entry& entry : s.tile_rows->Of(s.kept_batch, head, p.query_heads, tile)) {
        const Interval keys = {tile * BlockSparseMask::kKeys, (tile + 1) * BlockSparseMask::kKeys};
        const KeyRuns runs = VisibleKeys(p, s, entry.row);
        uint64_t seen = 0;
        for (const Interval& run : {Intersect(keys, runs.first), Intersect(keys, runs.second)}) {
          if (!run.empty()) seen |= ~uint64_t{0} >> (BlockSparseMask::kKeys - run.size()) << (run.begin - keys.begin);
        }
        if (seen != 0) f(s.tile_rows->WordOf(entry) & seen);
      }
    }
  }
}

bool KeepsAny(const Sequence& s, const BlockGrid& grid, int64_t block, int64_t key_head, const Interval& keys) {
  for (int64_t lane = 0; lane < grid.NumRows(block); ++lane) {
    const BlockGrid::Row row = grid.At(block, lane);
    if (NumKept(s, key_head * grid.heads + row.head, row.query, keys) > 0) return true;
  }
  return false;
}

}  // namespace

double VisitedPairs(const Problem& p, int64_t lanes, const KeyGrid& key_grid) {
  const bool by_data = p.mask.data != nullptr || !p.segments_q.empty() || p.has_pattern;
  double pairs = 0;
  std::vector<KeyRuns> rows;
  for (const Sequence& s : p.sequences) {
    if (s.tile_rows != nullptr) {
      ForTileRows(p, s, [&](uint64_t) { pairs += static_cast<double>(BlockSparseMask::kKeys); });
      continue;
    }
    const BlockGrid grid(p, s, lanes);
    // Masks without data to look at are equal for all heads that share queries, so one of them counts for all.
    const int64_t turns = by_data || grid.fused ? 1 : grid.heads;
    const int64_t key_heads = by_data ? p.key_heads : 1;
    double of_sequence = 0;
    for (int64_t head = 0; head < key_heads; ++head) {
      for (int64_t block = 0; block < grid.blocks; block += turns) {
        rows.clear();
        for (int64_t lane = 0; lane < grid.NumRows(block); ++lane) {
          rows.push_back(VisibleKeys(p, s, grid.At(block, lane).query));
        }
        double keys = 0;
        Tile tile;
        for (TileList tiles(s, rows, key_grid); tiles.Next(&tile);) {
          if (by_data && (CoverOf(p, s, grid, block, head, tile.keys) == Cover::kNone ||
                          !KeepsAny(s, grid, block, head, tile.keys))) {
            continue;
          }
          keys += static_cast<double>(tile.keys.size());
        }
        of_sequence += keys * static_cast<double>(grid.NumRows(block) * turns);
      }
    }
    pairs += of_sequence * static_cast<double>(by_data ? 1 : p.key_heads);
  }
  return pairs;
}

double KeptPairs(const Problem& p) {
  const bool by_pair = p.mask.data != nullptr || !p.segments_q.empty();
  double pairs = 0;
  for (const Sequence& s : p.sequences) {
    if (s.tile_rows != nullptr) {
      ForTileRows(p, s, [&](uint64_t kept) { pairs += std::popcount(kept); });
      continue;
    }
    for (int64_t i = 0; i < s.num_queries; ++i) {
      const KeyRuns runs = VisibleKeys(p, s, i);
      if (!by_pair && s.kept == nullptr) {
        pairs += static_cast<double>(runs.size() * p.query_heads);
        continue;
      }
      if (!by_pair) {
        for (int64_t h = 0; h < p.query_heads; ++h) {
          pairs += static_cast<double>(NumKept(s, h, i, runs.first) + NumKept(s, h, i, runs.second));
        }
        continue;
      }
      for (int64_t h = 0; h < p.query_heads; ++h) {
        for (const Interval& run : {runs.first, runs.second}) {
          for (int64_t j = run.begin; j < run.end; ++j) {
            bool keep = true;
            if (p.mask.data != nullptr) {
              keep = LoadAsInt64(DType::kBool, p.mask.data,
                                 s.batch * p.mask.batch_stride + h * p.mask.head_stride +
                                     (s.first_q + i) * p.mask.query_stride + j * p.mask.key_stride) != 0;
            }
            if (!p.segments_q.empty()) {
              const int32_t a = p.segments_q[static_cast<size_t>(s.batch * p.segments_q_stride + s.first_q + i)];
              const int32_t b = p.segments_k[static_cast<size_t>(s.batch * p.segments_k_stride + j)];
              keep = keep && a == b && a >= 0;
            }
            pairs += keep && NumKept(s, h, i, {j, j + 1}) > 0;
          }
        }
      }
    }
  }
  return pairs;
}

}  // namespace heed::softmax
