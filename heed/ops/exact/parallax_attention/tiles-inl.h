// Tiles of rows of Parallax attention, and their logits with a block of 64 keys.
//
// Compiled once per SIMD target. A tile has up to 64 rows: tokens of one block of 64 of a query head, or where there
// are few, as in decoding, of several heads of a key head. Pair matrices are [64 keys, columns] with a column for each
// row of the tile, rounded up to whole vectors. Each column is a computation of its own, so that the bits of a row do
// not depend on its tile.
#if defined(HEED_OPS_EXACT_PARALLAX_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_EXACT_PARALLAX_ATTENTION_TILES_INL_H_
#undef HEED_OPS_EXACT_PARALLAX_ATTENTION_TILES_INL_H_
#else
#define HEED_OPS_EXACT_PARALLAX_ATTENTION_TILES_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/ops/exact/common/token_blocks-inl.h"
#include "heed/ops/exact/parallax_attention/parallax_attention_internal.h"
#include "heed/simd/products-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::parallax_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;                 // simd/
using namespace heed::token_blocks;                 // NOLINT: exact/common/
using namespace heed::token_blocks::HWY_NAMESPACE;  // NOLINT

// The rows of a key head of a sequence, in blocks as the keys.
struct UnitRows {
  UnitRows(const Call& call, const Unit& of)
      : unit(of), group(call.group()), first(std::max<int64_t>(call.first() - of.tokens.begin, 0)),
        first_block(first / kBlock) {}
  const Unit& unit;
  int64_t group, first, first_block;  // first: token of the sequence

  int64_t begin(int64_t block) const { return std::max(first, block * kBlock); }
  int64_t tokens(int64_t block) const { return block * kBlock + unit.count(block) - begin(block); }
  bool has(int64_t block) const { return block < unit.blocks && block >= first_block && tokens(block) > 0; }
  int64_t heads_of_tile(int64_t block) const { return std::clamp<int64_t>(kBlock / tokens(block), 1, group); }
  int64_t tiles(int64_t block) const { return (group + heads_of_tile(block) - 1) / heads_of_tile(block); }
  // Tiles before a block, which is at most the last. Blocks between the first and the last are whole.
  int64_t tiles_before(int64_t block) const {
    return block <= first_block ? 0 : tiles(first_block) + (block - first_block - 1) * group;
  }
};

struct Tile {
  const Unit* unit;
  int64_t block, index;  // index: among the tiles of its block
};

// The rows of a tile: row i is token i % tokens of head i / tokens.
struct Place {
  Place(const UnitRows& rows, const Tile& tile)
      : b(rows.unit.tokens.batch), begin(rows.begin(tile.block)), tokens(rows.tokens(tile.block)) {
    const int64_t heads = rows.heads_of_tile(tile.block), before = tile.index * heads;
    head = rows.unit.key_head * rows.group + before;
    n = std::min(heads, rows.group - before) * tokens;
  }
  int64_t b, begin, tokens;  // begin: as a token of the sequence
  int64_t head, n;           // the first head, and the number of rows
  int64_t query = 0;         // `begin` as a token of q

  int64_t head_of(int64_t i) const { return head + i / tokens; }
  int64_t token_of(int64_t i) const { return query + i % tokens; }
};

inline Place PlaceOf(const Call& call, const Tile& tile) {
  Place place(UnitRows(call, *tile.unit), tile);
  place.query = tile.unit->tokens.begin + place.begin - call.first();
  return place;
}

// Common scratch of both passes: the rows of a tile, vectorised over queries, and a block of keys.
template <class T>
struct TileScratch {
  T *qT, *rT;       // [D, 64]
  T *k, *v;         // [64, Dp], [64, Vp]
  T *S, *t;         // [64, 64]: of q and r with the keys
  T *first, *last;  // [64]: of the keys of the block that a column sees
  int64_t Dp, Vp, columns = 0;

  void LayOut(const Call& call, Carver& carver) {
    Dp = Padded(call.D);
    Vp = Padded(call.Dv);
    for (T** rows : {&qT, &rT}) carver.Next(*rows, call.D * kBlock);
    carver.Next(k, kBlock * Dp);
    carver.Next(v, kBlock * Vp);
    for (T** square : {&S, &t}) carver.Next(*square, kBlock * kBlock);
    for (T** row : {&first, &last}) carver.Next(*row, kBlock);
  }
};

template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadTile(D d, const Place& place, const ConstTensorView& t, int64_t padded, T* to) {
  for (int64_t i = 0; i < place.n; ++i) {
    hs::LoadRow(d, At<S>(t, place.b, place.token_of(i), place.head_of(i)), t.size(3), padded, to + i * padded);
  }
}
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreTile(D d, const Place& place, const T* from, int64_t padded, const TensorView& t) {
  for (int64_t i = 0; i < place.n && t.present(); ++i) {
    hs::StoreRow(d, from + i * padded, t.size(3), At<S>(t, place.b, place.token_of(i), place.head_of(i)));
  }
}

// hs::Multiply; with `masked`, an a of -0 leaves out unchanged even where b is not finite.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void MultiplySeen(D d, bool masked, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step,
                               int64_t count, int64_t rows, int64_t columns, T* out, int64_t out_row) {
  if (!masked) return hs::Multiply(d, a, a_row, a_step, b, b_step, count, rows, columns, out, out_row);
  constexpr size_t N = hn::MaxLanes(D());
  const size_t vectors = (static_cast<size_t>(columns) + N - 1) / N;
  hs::ForTiles<hs::kShapes.tile_vectors>(0, vectors, [&](auto c, size_t j) HWY_ATTR {
    hs::ForTiles<hs::TileRows<c.value>()>(0, static_cast<size_t>(rows), [&](auto r, size_t i) HWY_ATTR {
      const auto at = static_cast<int64_t>(i);
      hs::AccumulateTile<r.value, c.value, true>(d, a + at * a_row, a_row, a_step, b + j * N, b_step,
                                                 static_cast<size_t>(count), out + at * out_row + j * N, out_row);
    });
  });
}

// Loads a block of keys and values and computes S and t. Returns whether some row sees not all of the keys; then first
// and last are set.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE bool MultiplyKeys(D d, const Call& call, const Inputs& in, const Tile& tile, const Place& place,
                               int64_t block, TileScratch<T>& c) {
  const Unit& unit = *tile.unit;
  const int64_t n = unit.count(block), key = block * kBlock, token = unit.tokens.begin + key;
  LoadRows<S>(d, in.k, place.b, token, n, unit.key_head, c.Dp, c.k);
  LoadRows<S>(d, in.v, place.b, token, n, unit.key_head, c.Vp, c.v);
  for (const auto& [rows, products] : {std::pair{c.qT, c.S}, {c.rT, c.t}}) {
    Clear(products, n * c.columns);
    hs::Multiply(d, c.k, c.Dp, 1, rows, c.columns, call.D, n, c.columns, products, c.columns);
  }
  if (block < tile.block && call.first_key(place.begin + place.tokens - 1) <= key) return false;
  for (int64_t i = 0; i < c.columns; ++i) {
    const int64_t at = place.begin + (i < place.n ? i % place.tokens : place.tokens - 1);
    c.first[i] = static_cast<T>(std::clamp<int64_t>(call.first_key(at) - key, 0, kBlock));
    c.last[i] = static_cast<T>(std::clamp<int64_t>(at - key, -1, kBlock));
  }
  return true;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::parallax_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_PARALLAX_ATTENTION_TILES_INL_H_
