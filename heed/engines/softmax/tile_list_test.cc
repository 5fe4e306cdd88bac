// The tiles and pairs that are computed, compared with the definition of every mask, pair by pair, on random problems
// with extreme positions and sizes.
#include "heed/engines/softmax/tile_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "heed/engines/softmax/forward/forward.h"
#include "heed/harness/buffer.h"

namespace heed::softmax {
namespace {

using Wide = __int128;  // sums of positions may exceed int64

Wide FloorDivide(Wide a, Wide b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }

// The interval terms of keep_ij as defined in the header of attention.
bool Keeps(const Problem& p, const Sequence& s, int64_t query, int64_t key) {
  if (query >= s.query_end) return false;
  const Wide position = Wide{s.start} + query, j = key;
  if (j < s.key_begin || j >= s.key_end) return false;
  if (p.causal && !(j <= position || j < s.prefix_end)) return false;
  const bool left = p.window_left == kUnlimited || j >= position - p.window_left;
  const bool right = p.window_right == kUnlimited || j <= position + p.window_right;
  if (!(left && right) && j >= s.sink_end) return false;
  return p.chunk == 0 || FloorDivide(j - s.key_begin, p.chunk) == FloorDivide(position - s.key_begin, p.chunk);
}

// The terms with data: mask and segments.
bool DataKeeps(const Problem& p, const Sequence& s, int64_t head, int64_t query, int64_t key) {
  if (p.mask.data != nullptr &&
      static_cast<const uint8_t*>(p.mask.data)[s.batch * p.mask.batch_stride + head * p.mask.head_stride +
                                               query * p.mask.query_stride + key * p.mask.key_stride] == 0) {
    return false;
  }
  if (p.segments_q.empty()) return true;
  const int32_t a = p.segments_q[static_cast<size_t>(s.batch * p.segments_q_stride + query)];
  const int32_t b = p.segments_k[static_cast<size_t>(s.batch * p.segments_k_stride + key)];
  return a == b && a >= 0;
}

constexpr int64_t kFar = int64_t{1} << 61;

// Makes a problem of interval masks with one sequence.
Problem RandomIntervals(Random& random) {
  Problem p;
  p.query_heads = p.key_heads = 1;
  Sequence s;
  s.num_keys = random.Pick<int64_t>({0, 1, random.Integer(2, 70), random.Integer(2, 300), random.Integer(600, 1300)});
  s.num_queries = random.Pick<int64_t>({0, 1, random.Integer(2, 90)});
  s.start = random.Pick<int64_t>({s.num_keys - s.num_queries, s.num_keys - s.num_queries, 0, random.Integer(-400, 400),
                                  random.Integer(-50, 1000), kFar, -kFar});
  if (random.Chance(0.3)) s.key_begin = random.Integer(0, s.num_keys);
  s.key_end = s.num_keys;
  if (random.Chance(0.3)) s.key_end = random.Integer(s.key_begin, s.num_keys);
  s.query_end = s.num_queries;
  if (random.Chance(0.2)) s.query_end = random.Integer(0, s.num_queries);
  const auto reach = [&] { return random.Pick<int64_t>({0, 0, 1, random.Integer(2, 90), kFar}); };
  s.prefix_end = s.key_begin + reach();
  s.sink_end = s.key_begin + reach();
  p.causal = random.Chance(0.5);
  const auto side = [&] {
    return random.Pick<int64_t>({kUnlimited, 0, 1, random.Integer(2, 60), random.Integer(60, 400), kFar});
  };
  if (random.Chance(0.6)) {
    p.window_left = side();
    p.window_right = side();
  }
  if (random.Chance(0.3)) {
    p.chunk = random.Pick<int64_t>({1, 2, random.Integer(3, 130), 64, INT64_MAX});
  }
  p.sequences = {s};
  return p;
}

std::set<int64_t> KeysOf(const KeyRuns& runs) {
  std::set<int64_t> keys;
  for (const Interval& run : {runs.first, runs.second}) {
    for (int64_t j = run.begin; j < run.end; ++j) keys.insert(j);
  }
  return keys;
}

TEST(VisibleKeysTest, AreThoseThatTheDefinitionKeeps) {
  Random random(1);
  int64_t split = 0;
  for (int round = 0; round < 20000; ++round) {
    const Problem p = RandomIntervals(random);
    const Sequence& s = p.sequences[0];
    for (int64_t i = 0; i < s.num_queries; i += random.Integer(1, 9)) {
      const KeyRuns runs = VisibleKeys(p, s, i);
      ASSERT_TRUE(runs.first.empty() || runs.second.empty() || runs.first.end < runs.second.begin);
      split += !runs.first.empty() && !runs.second.empty();
      std::set<int64_t> expected;
      for (int64_t j = 0; j < s.num_keys; ++j) {
        if (Keeps(p, s, i, j)) expected.insert(j);
      }
      ASSERT_EQ(KeysOf(runs), expected) << "round " << round << " query " << i;
      ASSERT_EQ(runs.size(), static_cast<int64_t>(expected.size()));
    }
  }
  EXPECT_GT(split, 500);
}

// Checks all guarantees of tiles for one block of rows.
void CheckTiles(const Problem& p, const Sequence& s, const std::vector<KeyRuns>& rows) {
  std::vector<std::set<int64_t>> visible;
  Interval hulls[2];
  for (const KeyRuns& row : rows) {
    visible.push_back(KeysOf(row));
    const Interval* runs[] = {&row.first, &row.second};
    for (int i = 0; i < 2; ++i) {
      if (runs[i]->empty()) continue;
      Interval& hull = hulls[i];
      hull = hull.empty() ? *runs[i] : Interval{std::min(hull.begin, runs[i]->begin), std::max(hull.end, runs[i]->end)};
    }
  }
  std::set<int64_t> visited;
  int64_t last_end = INT64_MIN, last_cell = -1;
  TileList tiles(s, rows);
  for (Tile tile; tiles.Next(&tile);) {
    const Interval& keys = tile.keys;
    ASSERT_LT(keys.begin, keys.end);
    ASSERT_GE(keys.begin, last_end);
    last_end = keys.end;
    ASSERT_GE(keys.begin, s.key_begin);
    ASSERT_LE(keys.end, s.key_end);
    const int64_t cell = (keys.begin - s.key_begin) / kTileKeys;
    ASSERT_EQ(cell, (keys.end - 1 - s.key_begin) / kTileKeys) << "crosses a boundary";
    ASSERT_GT(cell, last_cell) << "a cell of the grid visited twice";
    last_cell = cell;
    ASSERT_EQ(tile.segment, (keys.begin - s.key_begin) / kSegmentKeys);
    bool all = true;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      visited.insert(j);
      for (const auto& row : visible) all = all && row.count(j) != 0;
      // A key outside of both unions of runs can only be between two runs that meet in this tile.
      const auto inside = [j](const Interval& hull) { return hull.begin <= j && j < hull.end; };
      if (!inside(hulls[0]) && !inside(hulls[1])) {
        ASSERT_TRUE(keys.begin < hulls[0].end && hulls[0].end <= j && j < hulls[1].begin && hulls[1].begin < keys.end)
            << "key " << j << " visited in vain";
      }
    }
    if (tile.full) {
      ASSERT_TRUE(all) << "not full from " << keys.begin;
    }
    if (!p.windowed()) {
      ASSERT_EQ(tile.full, all) << "from " << keys.begin;
    }
  }
  for (const auto& row : visible) {
    for (const int64_t j : row) ASSERT_EQ(visited.count(j), 1u) << "key " << j;
  }
}

Sequence KeysFrom(int64_t begin) {
  Sequence s;
  s.key_begin = begin;
  s.key_end = s.num_keys = 1 << 20;
  return s;
}

TEST(TileListTest, CoverWhatRowsSeeOnceOnTheGrid) {
  Random random(2);
  for (int round = 0; round < 20000; ++round) {
    SCOPED_TRACE(round);
    const Problem p = RandomIntervals(random);
    const Sequence& s = p.sequences[0];
    if (s.num_queries == 0) continue;
    std::vector<KeyRuns> rows;
    int64_t query = random.Integer(0, s.num_queries - 1);
    const int64_t step = random.Pick<int64_t>({1, 1, 1, 0, 7});
    const int64_t count = random.Pick<int64_t>({1, 2, 16, 64});
    for (int64_t n = 0; n < count && query < s.num_queries; ++n) {
      rows.push_back(VisibleKeys(p, s, query));
      query += step;
    }
    CheckTiles(p, s, rows);
    if (HasFatalFailure()) return;
  }
}

// With pairs of keys, a tile only grows, by at most one key at either end, to a boundary of pairs or to the end of the
// valid keys.
TEST(TileListTest, APairOfKeysIsNeverCut) {
  Random random(3);
  for (int round = 0; round < 20000; ++round) {
    SCOPED_TRACE(round);
    const Problem p = RandomIntervals(random);
    const Sequence& s = p.sequences[0];
    if (s.num_queries == 0) continue;
    std::vector<KeyRuns> rows;
    for (int64_t i = random.Integer(0, s.num_queries - 1); i < s.num_queries && rows.size() < 16; ++i) {
      rows.push_back(VisibleKeys(p, s, i));
    }
    TileList single(s, rows), pairs(s, rows, {kTileKeys, 2});
    Tile tile, grown;
    while (single.Next(&tile)) {
      ASSERT_TRUE(pairs.Next(&grown));
      const auto& [begin, end] = grown.keys;
      EXPECT_EQ((begin - s.key_begin) % 2, 0);
      EXPECT_TRUE((end - s.key_begin) % 2 == 0 || end == s.key_end);
      EXPECT_LE(end, s.key_end);
      EXPECT_TRUE(begin == tile.keys.begin || begin == tile.keys.begin - 1);
      EXPECT_TRUE(end == tile.keys.end || end == tile.keys.end + 1);
      EXPECT_EQ(grown.segment, tile.segment);
      EXPECT_EQ(grown.grid, tile.grid);
      EXPECT_LE(grown.full, tile.full);
      for (const KeyRuns& row : rows) {
        if (!grown.full) break;
        EXPECT_TRUE(row.first.Contains(grown.keys) || row.second.Contains(grown.keys));
      }
    }
    ASSERT_FALSE(pairs.Next(&grown));
    if (HasFailure()) return;
  }
}

TEST(TileListTest, NoRowsAndRowsThatSeeNothingHaveNoTiles) {
  Tile tile;
  EXPECT_FALSE(TileList().Next(&tile));
  EXPECT_FALSE(TileList(KeysFrom(3), {}).Next(&tile));
  const std::vector<KeyRuns> rows(5);
  EXPECT_FALSE(TileList(KeysFrom(3), rows).Next(&tile));
}

TEST(TileListTest, TheGridCountsFromTheFirstValidKey) {
  const std::vector<KeyRuns> rows = {{{}, {10, 200}}};
  TileList list(KeysFrom(10), rows);
  std::vector<Interval> tiles;
  for (Tile tile; list.Next(&tile);) tiles.push_back(tile.keys);
  EXPECT_EQ(tiles, (std::vector<Interval>{{10, 74}, {74, 138}, {138, 200}}));
}

TEST(BlockGridTest, CoversEveryHeadAndQueryOnce) {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    Problem p;
    p.key_heads = random.Integer(1, 3);
    p.query_heads = p.key_heads * random.Integer(1, 9);
    Sequence s;
    s.num_queries = random.Pick<int64_t>({0, 1, 3, 16, random.Integer(1, 200)});
    const int64_t lanes = random.Pick<int64_t>({1, 2, 4, 16, 64});
    const BlockGrid grid(p, s, lanes);
    std::set<std::pair<int64_t, int64_t>> seen;
    for (int64_t block = 0; block < grid.blocks; ++block) {
      const int64_t num_rows = grid.NumRows(block);
      ASSERT_GE(num_rows, 1);
      ASSERT_LE(num_rows, lanes);
      for (int64_t lane = 0; lane < num_rows; ++lane) {
        const BlockGrid::Row row = grid.At(block, lane);
        ASSERT_TRUE(row.head >= 0 && row.head < p.group() && row.query >= 0 && row.query < s.num_queries);
        ASSERT_TRUE(seen.emplace(row.head, row.query).second);
        if (!grid.fused) {
          ASSERT_EQ(row.head, grid.At(block, 0).head);
        }
      }
    }
    ASSERT_EQ(static_cast<int64_t>(seen.size()), p.group() * s.num_queries);
    if (s.num_queries >= lanes) {
      ASSERT_FALSE(grid.fused);
    }
  }
}

TEST(BlockQueueTest, HandsOutEveryBlockOnceCostlyOnesFirst) {
  Random random(4);
  for (int round = 0; round < 500; ++round) {
    Problem p;
    p.key_heads = random.Integer(1, 3);
    p.query_heads = p.key_heads * random.Integer(1, 4);
    for (int64_t b = random.Integer(0, 5); b > 0; --b) {
      Sequence s;
      s.num_queries = random.Pick<int64_t>({0, 1, random.Integer(1, 200)});
      s.key_begin = random.Integer(0, 5);
      s.key_end = s.key_begin + random.Integer(0, 100);
      p.sequences.push_back(s);
    }
    constexpr int64_t kLanes = 16;
    const BlockQueue queue(p, kLanes);
    std::set<std::tuple<int64_t, int64_t, int64_t>> seen;
    double last_cost = 1e300;
    std::map<std::pair<int64_t, int64_t>, int64_t> last_block;
    for (int64_t i = 0; i < queue.size(); ++i) {
      const BlockQueue::Task task = queue.At(i);
      ASSERT_TRUE(seen.emplace(task.sequence, task.key_head, task.block).second);
      const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
      const double cost = static_cast<double>(s.num_queries * (s.key_end - s.key_begin));
      ASSERT_LE(cost, last_cost);
      last_cost = cost;
      const auto [at, first] = last_block.emplace(std::pair(task.sequence, task.key_head), task.block);
      if (!first) {
        ASSERT_LT(task.block, at->second) << "late rows come first";
      }
      at->second = task.block;
    }
    std::set<std::tuple<int64_t, int64_t, int64_t>> expected;
    for (size_t b = 0; b < p.sequences.size(); ++b) {
      const BlockGrid grid(p, p.sequences[b], kLanes);
      for (int64_t h = 0; h < p.key_heads; ++h) {
        for (int64_t block = 0; block < grid.blocks; ++block) {
          expected.emplace(static_cast<int64_t>(b), h, block);
        }
      }
    }
    ASSERT_EQ(seen, expected);
  }
}

// A problem with a boolean mask, segments or both, with memory of its own.
struct DataProblem {
  Problem p;
  std::vector<uint8_t> mask;
};

DataProblem RandomData(Random& random) {
  DataProblem d;
  Problem& p = d.p;
  p = RandomIntervals(random);
  p.sequences[0].num_queries = std::min<int64_t>(p.sequences[0].num_queries, 40);
  p.sequences[0].num_keys = std::min<int64_t>(p.sequences[0].num_keys, 200);
  const int64_t Tq = p.sequences[0].num_queries, Tk = p.sequences[0].num_keys;
  p.key_heads = random.Integer(1, 2);
  p.query_heads = p.key_heads * random.Integer(1, 3);
  Sequence& s = p.sequences[0];
  s.key_begin = std::min(s.key_begin, Tk);
  s.key_end = std::clamp(s.key_end, s.key_begin, Tk);
  s.query_end = std::min(s.query_end, Tq);
  p.sequences.push_back(s);
  p.sequences[1].batch = 1;
  p.sequences[1].start += random.Integer(-20, 20);
  const bool segments = random.Chance(0.5);
  if (segments) {
    // Makes runs of equal ids, so that tiles may be kept completely or not at all.
    const auto ids = [&](int64_t n) {
      std::vector<int32_t> list;
      const int64_t run = random.Pick<int64_t>({1, 5, 70, 400});
      int32_t id = 0;
      for (int64_t i = 0; i < 2 * n; ++i) {
        if (i % run == 0) id = static_cast<int32_t>(random.Integer(-1, 2));
        list.push_back(id);
      }
      return list;
    };
    p.segments_q = ids(Tq);
    p.segments_k = ids(Tk);
    p.segments_q_stride = Tq;
    p.segments_k_stride = Tk;
    if (p.segments_q.empty() || p.segments_k.empty()) {
      p.segments_q.clear();
      p.segments_k.clear();
    }
  }
  if (!segments || random.Chance(0.3)) {
    const int64_t sizes[] = {2, p.query_heads, Tq, Tk};
    int64_t* const strides[] = {&p.mask.batch_stride, &p.mask.head_stride, &p.mask.query_stride, &p.mask.key_stride};
    int64_t step = 1;
    for (int axis = 3; axis >= 0; --axis) {
      *strides[axis] = random.Chance(0.3) ? 0 : step;
      if (*strides[axis] != 0) step *= std::max<int64_t>(sizes[axis], 1);
    }
    // Makes blocks of zeros and ones; "one" may be any nonzero byte.
    const int64_t run = random.Pick<int64_t>({1, 60, 500, 100000});
    uint8_t value = 1;
    for (int64_t i = 0; i < step; ++i) {
      if (i % run == 0) value = random.Pick<uint8_t>({0, 1, 255});
      d.mask.push_back(value);
    }
    p.mask.dtype = DType::kBool;
    p.mask.data = d.mask.data();
  }
  return d;
}

TEST(CoverTest, NoneAndAllAreClaimedOnlyWhereTrue) {
  Random random(5);
  int counts[3] = {};
  for (int round = 0; round < 3000; ++round) {
    const DataProblem d = RandomData(random);
    const Problem& p = d.p;
    const int64_t lanes = random.Pick<int64_t>({1, 4, 16, 64});
    for (const Sequence& s : p.sequences) {
      const BlockGrid grid(p, s, lanes);
      if (grid.blocks == 0 || s.key_begin >= s.key_end) continue;
      const int64_t block = random.Integer(0, grid.blocks - 1);
      const int64_t key_head = random.Integer(0, p.key_heads - 1);
      const int64_t begin = random.Integer(s.key_begin, s.key_end - 1);
      const Interval keys = {begin, std::min(begin + kTileKeys, s.key_end)};
      int64_t kept = 0, pairs = 0;
      for (int64_t lane = 0; lane < grid.NumRows(block); ++lane) {
        const BlockGrid::Row row = grid.At(block, lane);
        for (int64_t j = keys.begin; j < keys.end; ++j) {
          kept += DataKeeps(p, s, key_head * grid.heads + row.head, row.query, j);
          ++pairs;
        }
      }
      const Cover cover = CoverOf(p, s, grid, block, key_head, keys);
      ++counts[static_cast<int>(cover)];
      if (cover == Cover::kNone) {
        ASSERT_EQ(kept, 0) << round;
      }
      if (cover == Cover::kAll) {
        ASSERT_EQ(kept, pairs) << round;
      }
      if (p.segments_q.empty()) {  // a mask is read completely
        ASSERT_EQ(cover == Cover::kNone, kept == 0) << round;
        ASSERT_EQ(cover == Cover::kAll, kept == pairs) << round;
      }
    }
  }
  for (const int count : counts) EXPECT_GT(count, 100);
}

TEST(PairsTest, KeptAreCountedPairByPairAndVisitedBlockByBlock) {
  Random random(6);
  for (int round = 0; round < 1500; ++round) {
    DataProblem d = RandomData(random);
    Problem& p = d.p;
    if (random.Chance(0.3)) {
      p.mask = {};
      p.segments_q.clear();
      p.segments_k.clear();
    }
    const int64_t lanes = random.Pick<int64_t>({1, 4, 16, 64});
    double kept = 0, visited = 0;
    for (const Sequence& s : p.sequences) {
      for (int64_t h = 0; h < p.query_heads; ++h) {
        for (int64_t i = 0; i < s.num_queries; ++i) {
          for (int64_t j = 0; j < s.num_keys; ++j) {
            kept += Keeps(p, s, i, j) && DataKeeps(p, s, h, i, j);
          }
        }
      }
      const BlockGrid grid(p, s, lanes);
      for (int64_t h = 0; h < p.key_heads; ++h) {
        for (int64_t block = 0; block < grid.blocks; ++block) {
          std::vector<KeyRuns> rows;
          for (int64_t lane = 0; lane < grid.NumRows(block); ++lane) {
            rows.push_back(VisibleKeys(p, s, grid.At(block, lane).query));
          }
          TileList tiles(s, rows);
          for (Tile tile; tiles.Next(&tile);) {
            if ((p.mask.data != nullptr || !p.segments_q.empty()) &&
                CoverOf(p, s, grid, block, h, tile.keys) == Cover::kNone) {
              continue;
            }
            visited += static_cast<double>(tile.keys.size() * grid.NumRows(block));
          }
        }
      }
    }
    ASSERT_EQ(KeptPairs(p), kept) << round;
    ASSERT_EQ(VisitedPairs(p, lanes), visited) << round;
    ASSERT_GE(visited, kept) << round;
  }
}

}  // namespace
}  // namespace heed::softmax
