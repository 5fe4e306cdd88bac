// Gradients of Parallax attention: tiles of 64 rows pass over the blocks of their keys from the first to their own,
// recompute p and t, and add to the gradients of their rows and of the keys.
//
// FMA-bound: 6 D + 2 Dv per pair. The gradients of keys and values are ordered reductions: tiles add in ascending
// order, and the tiles of a key head follow each other at a distance of a block.
#include "heed/core/targets.h"
// After targets.h:
#include <cstdint>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/ticket.h"
#include "heed/ops/exact/parallax_attention/parallax_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/parallax_attention/parallax_attention_backward.cc"  // this file
#include "hwy/foreach_target.h"                                                                // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/ops/exact/parallax_attention/tiles-inl.h"
#include "heed/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::parallax_attention::HWY_NAMESPACE {

// Sums of gradients of a block of keys.
template <class T>
struct Sums {
  T *dk, *dv;  // [64, Dp], [64, Vp]
  int64_t bytes;

  Sums(const Call& call, void* base) {
    Carver carver(base);
    carver.Next(dk, kBlock * Padded(call.D));
    carver.Next(dv, kBlock * Padded(call.Dv));
    bytes = carver.bytes();
  }
};

template <class T>
struct BackwardScratch : TileScratch<T> {
  T *q, *r, *dq, *dr;                // [64, Dp]
  T *d_o, *o, *m;                    // [64, Vp]
  T *d_oT, *G;                       // [Dv, 64]; [64, 64]: of d_o with the values
  T *lse, *mean, *of_mean, *offset;  // [64]: <d_o, m>, and <d_o, m - o> + d_lse
  int64_t bytes;

  BackwardScratch(const Call& call, void* base) {
    Carver carver(base);
    this->LayOut(call, carver);
    for (T** rows : {&q, &r, &dq, &dr}) carver.Next(*rows, kBlock * this->Dp);
    for (T** rows : {&d_o, &o, &m}) carver.Next(*rows, kBlock * this->Vp);
    carver.Next(d_oT, call.Dv * kBlock);
    carver.Next(G, kBlock * kBlock);
    for (T** row : {&lse, &mean, &of_mean, &offset}) carver.Next(*row, kBlock);
    bytes = carver.bytes();
  }
};

template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadRowsOfTile(D d, const Call& call, const BackwardInputs& in, const Place& place,
                                 BackwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  LoadTile<S>(d, place, in.q, c.Dp, c.q);
  LoadTile<S>(d, place, in.r, c.Dp, c.r);
  LoadTile<S>(d, place, in.d_o, c.Vp, c.d_o);
  LoadTile<S>(d, place, in.o, c.Vp, c.o);
  LoadTile<T>(d, place, in.m, c.Vp, c.m);
  hs::TransposeRows(c.q, c.Dp, place.n, call.D, c.qT, c.columns);
  hs::TransposeRows(c.r, c.Dp, place.n, call.D, c.rT, c.columns);
  hs::TransposeRows(c.d_o, c.Vp, place.n, call.Dv, c.d_oT, c.columns);
  for (T* of_rows : {c.lse, c.mean, c.of_mean, c.offset}) Clear(of_rows, c.columns);
  for (int64_t i = 0; i < place.n; ++i) {
    auto of_mean = hn::Zero(d), offset = hn::Zero(d);
    for (int64_t e = i * c.Vp; e < (i + 1) * c.Vp; e += N) {
      const auto d_o = hn::Load(d, c.d_o + e), m = hn::Load(d, c.m + e);
      of_mean = hn::MulAdd(d_o, m, of_mean);
      offset = hn::MulAdd(d_o, hn::Sub(m, hn::Load(d, c.o + e)), offset);
    }
    const int64_t h = place.head_of(i), token = place.token_of(i);
    c.lse[i] = *At<T>(in.lse, place.b, h, token);
    c.mean[i] = *At<T>(in.a, place.b, h, token);
    c.of_mean[i] = hn::ReduceSum(d, of_mean);
    c.offset[i] = hn::ReduceSum(d, offset) + (in.d_lse.present() ? *At<T>(in.d_lse, place.b, h, token) : T{0});
  }
}

// Computes P (1 + a - t) from S, dt from t and scale dS from G, in place. With kMasked, pairs that are not seen become
// -0.
template <bool kMasked, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void OfPairs(D d, int64_t keys, T scale, const BackwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factor = hn::Set(d, scale), one = hn::Set(d, T{1}), skipped = hn::Set(d, T{-0.0});
  for (int64_t i = 0; i < c.columns; i += N) {
    const auto lse = hn::Load(d, c.lse + i), mean = hn::Load(d, c.mean + i), of_mean = hn::Load(d, c.of_mean + i),
               offset = hn::Load(d, c.offset + i);
    [[maybe_unused]] const auto first = hn::Load(d, c.first + i), last = hn::Load(d, c.last + i);
    for (int64_t j = 0; j < keys; ++j) {
      T *HWY_RESTRICT S = c.S + j * c.columns + i, *HWY_RESTRICT t = c.t + j * c.columns + i,
                      *HWY_RESTRICT G = c.G + j * c.columns + i;
      const auto store = [&](auto x, T* to) HWY_ATTR {
        if constexpr (kMasked) {
          const auto key = hn::Set(d, static_cast<T>(j));
          x = hn::IfThenElse(hn::And(hn::Le(first, key), hn::Le(key, last)), x, skipped);
        }
        hn::Store(x, d, to);
      };
      const auto p = hs::ExpNonPositive(d, hn::MulSub(factor, hn::Load(d, S), lse)),
                 x = hn::Sub(hn::Load(d, G), of_mean), weight = hn::Add(one, hn::Sub(mean, hn::Load(d, t)));
      store(hn::Mul(p, weight), S);
      store(hn::Neg(hn::Mul(p, x)), t);
      store(hn::Mul(hn::Mul(factor, p), hn::MulAdd(x, weight, offset)), G);
    }
  }
}

// `sums(j)`: those of block j of the task's key head; tickets: a counter for each.
template <class S, class D, class SumsOf, class T = hn::TFromD<D>>
HWY_NOINLINE void BackwardTile(D d, const Call& call, const BackwardInputs& in, const Gradients& out, const Tile& tile,
                               const SumsOf& sums, TicketCounter* tickets, BackwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const UnitRows rows(call, *tile.unit);
  const Place place = PlaceOf(call, tile);
  const T scale = static_cast<T>(call.scale);
  const int64_t n = place.n;
  c.columns = (n + N - 1) / N * N;
  LoadRowsOfTile<S>(d, call, in, place, c);
  for (T* of_rows : {c.dq, c.dr}) Clear(of_rows, n * c.Dp);
  for (int64_t j = call.first_key(place.begin) / kBlock; j <= tile.block; ++j) {
    const int64_t keys = tile.unit->count(j);
    const bool masked = MultiplyKeys<S>(d, call, in, tile, place, j, c);
    Clear(c.G, keys * c.columns);
    hs::Multiply(d, c.v, c.Vp, 1, c.d_oT, c.columns, call.Dv, keys, c.columns, c.G, c.columns);
    masked ? OfPairs<true>(d, keys, scale, c) : OfPairs<false>(d, keys, scale, c);
    for (const auto& [wanted, of_logits, to] :
         {std::tuple{out.dq.present(), c.G, c.dq}, {out.dr.present(), c.t, c.dr}}) {
      if (wanted) MultiplySeen(d, masked, of_logits, 1, c.columns, c.k, c.Dp, keys, n, call.D, to, c.Dp);
    }
    if (!out.dk.present() && !out.dv.present()) continue;
    const Sums<T> of_keys = sums(j);
    WaitForTicket(tickets[j], rows.tiles_before(tile.block) - rows.tiles_before(j) + tile.index);
    if (out.dk.present()) {
      MultiplySeen(d, masked, c.G, c.columns, 1, c.q, c.Dp, n, keys, call.D, of_keys.dk, c.Dp);
      MultiplySeen(d, masked, c.t, c.columns, 1, c.r, c.Dp, n, keys, call.D, of_keys.dk, c.Dp);
    }
    if (out.dv.present()) {
      MultiplySeen(d, masked, c.S, c.columns, 1, c.d_o, c.Vp, n, keys, call.Dv, of_keys.dv, c.Vp);
    }
    ReleaseTicket(tickets[j]);
  }
  StoreTile<S>(d, place, c.dq, c.Dp, out.dq);
  StoreTile<S>(d, place, c.dr, c.Dp, out.dr);
}

mechanism::Reservation BackwardMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto) HWY_ATTR {
    using T = decltype(computed);
    const int64_t block_bytes = Sums<T>(call, nullptr).bytes;
    const int64_t most = MostBlocks(Waves(call.sequences, call.Hkv, block_bytes));
    memory.per_thread = BackwardScratch<T>(call, nullptr).bytes;
    memory.shared = most * block_bytes;
    memory.tables = most * int64_t{sizeof(TicketCounter)};
  });
  return memory;
}

void BackwardImpl(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  BackwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const hn::ScalableTag<T> d;
    const int64_t block_bytes = Sums<T>(call, nullptr).bytes, Dp = Padded(call.D), Vp = Padded(call.Dv);
    const std::vector<std::vector<Unit>> waves = Waves(call.sequences, call.Hkv, block_bytes);
    const int64_t longest = LongestUnit(waves);
    char* const shared = static_cast<char*>(ctx.Shared());
    TicketCounter* const tickets = static_cast<TicketCounter*>(ctx.Tables());
    const auto sums_of = [&](const Unit& unit, int64_t j) {
      return Sums<T>(call, shared + (unit.first + j) * block_bytes);
    };
    for (const std::vector<Unit>& wave : waves) {
      std::vector<Tile> tiles, blocks;
      for (int64_t i = 0; i < longest; ++i) {  // in the order of their tickets
        for (const Unit& unit : wave) {
          if (i < unit.blocks) blocks.push_back({&unit, i, 0});
          const UnitRows rows(call, unit);
          for (int64_t index = 0; rows.has(i) && index < rows.tiles(i); ++index) tiles.push_back({&unit, i, index});
        }
      }
      for (int64_t i = 0; i < NumBlocks(wave); ++i) new (&tickets[i]) TicketCounter(0);
      const auto for_blocks = [&](const auto& f) {
        ctx.ParallelFor(std::ssize(blocks), [&](int64_t i, int) HWY_ATTR {
          const Tile& block = blocks[static_cast<size_t>(i)];
          f(*block.unit, block.block, sums_of(*block.unit, block.block));
        });
      };
      for_blocks([&](const Unit&, int64_t, const Sums<T>& sums) HWY_ATTR {
        Clear(sums.dk, kBlock * Dp);
        Clear(sums.dv, kBlock * Vp);
      });
      ctx.ParallelFor(std::ssize(tiles), [&](int64_t i, int worker) HWY_ATTR {
        const Tile& tile = tiles[static_cast<size_t>(i)];
        BackwardScratch<T> scratch(call, ctx.Scratch(worker));
        BackwardTile<S>(
            d, call, in, out, tile, [&](int64_t j) HWY_ATTR { return sums_of(*tile.unit, j); },
            tickets + tile.unit->first, scratch);
      });
      for_blocks([&](const Unit& unit, int64_t j, const Sums<T>& sums) HWY_ATTR {
        const int64_t token = unit.tokens.begin + j * kBlock;
        StoreRows<S>(d, sums.dk, Dp, out.dk, unit.tokens.batch, token, unit.count(j), unit.key_head);
        StoreRows<S>(d, sums.dv, Vp, out.dv, unit.tokens.batch, token, unit.count(j), unit.key_head);
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::parallax_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::parallax_attention {

HWY_EXPORT(BackwardImpl);
HWY_EXPORT(BackwardMemoryImpl);

void ComputeBackward(Context& ctx, const Call& call, const BackwardInputs& in, const Gradients& out) {
  HWY_DISPATCH_TABLE(BackwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation BackwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(BackwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::parallax_attention
#endif  // HWY_ONCE
