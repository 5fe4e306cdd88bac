// The query rows of a block, a query per lane: the keys that each sees, per-lane data for the passes over a tile, and
// the tiles in which some row keeps a pair.
//
// Compiled once per SIMD target, operand type and number of vectors.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_ROWS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_ROWS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "heed/engines/softmax/block/decays-inl.h"
#include "heed/engines/softmax/block/head-inl.h"
#include "heed/engines/softmax/block/kept_tile-inl.h"
#include "heed/engines/softmax/block/lanes-inl.h"
#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

template <class O, int C>
class BlockRows {
 public:
  BlockRows(const Problem& problem, const Sequence& sequence, const BlockGrid& grid, int64_t key_head, int64_t block,
            Workspace<O>& workspace, const Head<O>& head)
      : p_(problem), s_(sequence), grid_(grid), key_head_(key_head), block_(block), head_(head), w_(workspace),
        num_rows_(static_cast<size_t>(grid.NumRows(block))), vectors_(VectorsOf(num_rows_)) {}

  // Makes the block's queries those of several sequences, one after the other, `queries_each` of each.
  void Join(const Sequence* members, int64_t queries_each) {
    members_ = members;
    queries_each_ = queries_each;
  }

 protected:
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t W = C * N;
  // The number of register tiles side by side in a block.
  static constexpr int kParts = O::kLaneVectors > 1 ? 1 : std::max(1, C / hs::kShapes.tile_vectors);

  // Finds the keys that each row sees.
  HWY_INLINE void FindKeys() {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      BlockGrid::Row& row = rows_[lane] = grid_.At(block_, static_cast<int64_t>(lane));
      of_[lane] = &s_;
      if (members_ != nullptr) {
        of_[lane] = members_ + row.query / queries_each_;
        row.query %= queries_each_;
      }
      // Made in place: a copy would load as one vector what has just been stored as four numbers, and wait for the
      // stores.
      ::new (static_cast<void*>(&runs_[lane])) KeyRuns(VisibleKeys(p_, *of_[lane], row.query));
    }
  }

  // Restricts every row to these keys.
  HWY_INLINE void KeepKeys(const Interval& keys) {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      for (Interval* run : {&runs_[lane].first, &runs_[lane].second}) {
        *run = {std::max(run->begin, keys.begin), std::min(run->end, keys.end)};
      }
    }
  }

  HWY_INLINE bool SeesAny() const {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      if (runs_[lane].size() > 0) return true;
    }
    return false;
  }

  // Returns the number of keys from the first to the last that some row sees; valid after SetLanes().
  HWY_INLINE int64_t SeenKeys() const {
    Interval seen;
    for (const Interval& hull : hull_) {
      if (!hull.empty())
        seen = seen.empty() ? hull : Interval{std::min(seen.begin, hull.begin), std::max(seen.end, hull.end)};
    }
    return seen.size();
  }

  // Sets up everything else that does not depend on the tile.
  HWY_INLINE void Prepare() {
    const void* q[W];
    SetLanes(q);
    PackQueries(p_.dtype, q);
    w_.ahead.Spread((SeenKeys() + SeenKeys() * p_.value_depth / kTileKeys) * kParts / hs::TileRows<C>());
  }

  // Fills lanes_ with the per-lane data of the passes over a tile, and q with pointers to the queries.
  HWY_NOINLINE void SetLanes(const void** q);

  // Packs the queries into lanes; rows are the pointers to them.
  HWY_NOINLINE void PackQueries(DType dtype, const void* const* rows);

  // Calls f(tile) for each tile of which some pair is kept, in ascending order.
  template <class F>
  HWY_INLINE void ForTiles(const F& f) {
    TileList tiles(s_, {runs_, num_rows_}, O::kGrid);
    if (p_.has_pattern) BeginKept(s_.key_begin);
    while (true) {
      if (p_.has_pattern) tiles.SkipTo(kept_.lists.Next(tiles.at()));
      Tile tile;
      if (!tiles.Next(&tile)) break;
      if (BeginTile(tile, p_.has_pattern ? kept_.Find(tile.keys) : Cover::kAll)) f(tile);
    }
  }

  // Calls f(tile) for the tile that begins here on the grid if some pair of it is kept. Each row keeps the keys whose
  // bits are set in its words.
  template <class F>
  HWY_INLINE void ForTile(int64_t begin, const uint64_t (*words)[O::kGrid.tile / BlockSparseMask::kKeys], const F& f) {
    KeepKeys({begin, begin + O::kGrid.tile});
    TileList tiles(s_, {runs_, num_rows_}, O::kGrid);
    Tile tile;
    if (tiles.Next(&tile) && BeginTile(tile, kept_.FindWords(tile.keys, begin, words, num_rows_))) f(tile);
  }

  // Sets up a tile, given how much of it the pattern keeps. Returns whether any pair is kept.
  HWY_NOINLINE bool BeginTile(const Tile& tile, Cover kept);

  // Returns whether the pattern may keep any of these keys, by tiles alone. It is called before anything else is
  // computed for the block, as the answer is mostly no.
  HWY_INLINE bool MayKeep(const Interval& keys) const {
    if (s_.kept == nullptr) return true;
    for (int64_t lane = 0; lane < static_cast<int64_t>(num_rows_);) {
      const BlockGrid::Row row = grid_.At(block_, lane);
      if (s_.kept->KeepsAny(s_.kept_batch, key_head_ * grid_.heads + row.head, row.query, keys.begin, keys.end)) {
        return true;
      }
      lane += std::min(BlockSparseMask::kRows - row.query % BlockSparseMask::kRows, grid_.num_queries - row.query);
    }
    return false;
  }

  // Returns the number of groups that begin before this key, that are in `groups` and for which MayKeep() holds.
  HWY_INLINE int64_t KeptGroupsBefore(int64_t end, const VisibleGroups& groups, int64_t group_keys) {
    int64_t count = 0;
    BeginKept(s_.key_begin);
    for (int64_t key = kept_.lists.Next(s_.key_begin); key < end;) {
      const int64_t group = (key - s_.key_begin) / group_keys;
      count += groups.Contains(group) ? 1 : 0;
      key = kept_.lists.Next(s_.key_begin + (group + 1) * group_keys);
    }
    return count;
  }

  // Begins the tile lists of the rows at this key.
  HWY_INLINE void BeginKept(int64_t key) {
    kept_.lists.Begin(num_rows_, key, [&](size_t lane) {
      const BlockGrid::Row& row = rows_[lane];
      return typename KeptKeys<W>::Row{of_[lane]->kept, of_[lane]->kept_batch, key_head_ * grid_.heads + row.head,
                                       row.query};
    });
  }

  static const void* PairRow(const Pairs& pairs, size_t element, const Sequence& s, int64_t head, int64_t query) {
    return static_cast<const char*>(pairs.data) +
           (s.batch * pairs.batch_stride + head * pairs.head_stride + (s.first_q + query) * pairs.query_stride) *
               static_cast<int64_t>(element);
  }

  // The number of vectors that a full tile is computed for: those with rows, rounded up to whole register tiles.
  static constexpr size_t VectorsOf(size_t num_rows) {
    constexpr size_t kLanes = W / kParts;
    return O::kLaneVectors > 1 ? C : (num_rows + kLanes - 1) / kLanes * (kLanes / N);
  }

  static constexpr D d_{};
  const Problem& p_;
  const Sequence& s_;
  const BlockGrid& grid_;
  const int64_t key_head_, block_;
  Head<O> head_;
  Workspace<O>& w_;
  const size_t num_rows_, vectors_;
  Lanes<T, W> lanes_;
  Decays<O, C> decays_;
  BlockGrid::Row rows_[W];
  const Sequence* of_[W];  // the sequence of each row
  KeyRuns runs_[W];
  int64_t keys_until_ = 0;  // end of the keys from the current tile on that some row may see
  LinesBetween between_;    // used if O::kQuantized
  // True where AMX computes the products and no term comes between them and the masks: logits are then stored without
  // factor_.of_logits, which is applied in the exponent.
  bool raw_ = false;
  bool queries_finite_ = true;
  bool partial_ = false;  // the mask, segments or a pattern keep only a part of the current tile
  LogitFactor factor_;
  const Sequence* members_ = nullptr;  // the sequences of joined rows; null: all rows are of s_
  int64_t queries_each_ = 0;
  Interval hull_[C];
  bool masked_ = false, partly_kept_ = false;  // the mask or segments keep a part; a pattern does
  KeptTile<T, C, N, O::kGrid.tile> kept_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_ROWS_INL_H_
