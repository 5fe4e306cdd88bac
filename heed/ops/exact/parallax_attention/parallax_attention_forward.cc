// The forward pass of Parallax attention: tiles of 64 rows pass over the blocks of their keys from the first to their
// own, with an online softmax and an online covariance.
//
// FMA-bound: 2 (D + Dv) per pair. All tiles are independent. A tile loads its blocks of keys and values itself: that is
// 1 / 64 of its products, and saves a copy of them in memory, which decoding would wait for.
#include "heed/core/targets.h"
// After targets.h:
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/parallax_attention/parallax_attention_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/exact/parallax_attention/parallax_attention_forward.cc"  // this file
#include "hwy/foreach_target.h"                                                               // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/core/carver.h"
#include "heed/ops/exact/parallax_attention/tiles-inl.h"
#include "heed/simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::parallax_attention::HWY_NAMESPACE {

// Sums of a row over its keys so far, relative to the largest logit: p of the probabilities.
template <class T>
struct ForwardScratch : TileScratch<T> {
  T *m, *c;              // [64, Vp]: sums of p v, and of p (t - mean) v
  T *most, *sum, *mean;  // [64]: the largest logit, the sum of p, and about that of p t / sum
  T* left;               // [64]: the sum of p (t - mean), as the mean is rounded
  T *rescale, *shift;    // [64]: what a block changes: the factor of earlier p, and the mean
  int64_t bytes;

  ForwardScratch(const Call& call, void* base) {
    Carver carver(base);
    this->LayOut(call, carver);
    for (T** rows : {&m, &c}) carver.Next(*rows, kBlock * this->Vp);
    for (T** row : {&most, &sum, &mean, &left, &rescale, &shift}) carver.Next(*row, kBlock);
    bytes = carver.bytes();
  }
};

// Computes p from S and p (t - mean) from t, in place, with the largest logit and the mean over the keys so far. With
// kMasked, pairs that are not seen become -0.
template <bool kMasked, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Softmax(D d, int64_t keys, T scale, ForwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factor = hn::Set(d, scale), zero = hn::Zero(d), skipped = hn::Set(d, T{-0.0}),
             none = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < c.columns; i += N) {
    T *HWY_RESTRICT S = c.S + i, *HWY_RESTRICT t = c.t + i;
    [[maybe_unused]] const auto first = hn::Load(d, c.first + i), last = hn::Load(d, c.last + i);
    const auto seen = [&](int64_t j, auto x, auto otherwise) HWY_ATTR {
      if constexpr (!kMasked) return x;
      const auto key = hn::Set(d, static_cast<T>(j));
      return hn::IfThenElse(hn::And(hn::Le(first, key), hn::Le(key, last)), x, otherwise);
    };
    const auto before = hn::Load(d, c.most + i);
    auto most = before;
    for (int64_t j = 0; j < keys; ++j) {
      const auto x = seen(j, hn::Mul(factor, hn::Load(d, S + j * c.columns)), none);
      hn::Store(x, d, S + j * c.columns);
      most = hn::Max(x, most);
    }
    const auto largest = hn::IfThenElse(hn::Eq(most, none), zero, most);  // no key yet: p = exp(-infinity)
    const auto rescale = hs::ExpNonPositive(d, hn::Sub(before, largest)), mean = hn::Load(d, c.mean + i);
    auto sum = zero, moved = zero;
    for (int64_t j = 0; j < keys; ++j) {
      const auto p = hs::ExpNonPositive(d, hn::Sub(hn::Load(d, S + j * c.columns), largest));
      sum = hn::Add(sum, p);
      moved = hn::Add(moved, seen(j, hn::Mul(p, hn::Sub(hn::Load(d, t + j * c.columns), mean)), zero));
      hn::Store(seen(j, p, skipped), d, S + j * c.columns);
    }
    const auto earlier = hn::Mul(hn::Load(d, c.sum + i), rescale),
               earlier_left = hn::Mul(hn::Load(d, c.left + i), rescale);
    sum = hn::Add(earlier, sum);
    moved = hn::Add(earlier_left, moved);
    const auto new_mean = hn::Add(mean, hn::IfThenElse(hn::Eq(sum, zero), zero, hn::Div(moved, sum))),
               shift = hn::Sub(new_mean, mean);
    auto left = hn::NegMulAdd(shift, earlier, earlier_left);
    for (int64_t j = 0; j < keys; ++j) {
      const auto x = hn::Mul(hn::Load(d, S + j * c.columns), hn::Sub(hn::Load(d, t + j * c.columns), new_mean));
      left = hn::Add(left, seen(j, x, zero));
      hn::Store(seen(j, x, skipped), d, t + j * c.columns);
    }
    hn::Store(most, d, c.most + i);
    hn::Store(sum, d, c.sum + i);
    hn::Store(new_mean, d, c.mean + i);
    hn::Store(left, d, c.left + i);
    hn::Store(rescale, d, c.rescale + i);
    hn::Store(shift, d, c.shift + i);
  }
}

// Sums over earlier blocks relative to the new largest logit and mean.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Rescale(D d, int64_t n, ForwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t i = 0; i < n; ++i) {
    if (c.rescale[i] == 1 && c.shift[i] == 0) continue;
    const auto rescale = hn::Set(d, c.rescale[i]), shift = hn::Set(d, c.shift[i]);
    for (int64_t e = i * c.Vp; e < (i + 1) * c.Vp; e += N) {
      const auto m = hn::Mul(rescale, hn::Load(d, c.m + e));
      hn::Store(m, d, c.m + e);
      hn::Store(hn::NegMulAdd(shift, m, hn::Mul(rescale, hn::Load(d, c.c + e))), d, c.c + e);
    }
  }
}

template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ForwardTile(D d, const Call& call, const Inputs& in, const Outputs& out, const Tile& tile,
                              ForwardScratch<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  const Place place = PlaceOf(call, tile);
  const T scale = static_cast<T>(call.scale);
  c.columns = (place.n + N - 1) / N * N;
  for (const auto& [rows, lanes] : {std::pair{in.q, c.qT}, {in.r, c.rT}}) {
    LoadTile<S>(d, place, rows, c.Dp, c.k);
    hs::TransposeRows(c.k, c.Dp, place.n, call.D, lanes, c.columns);
  }
  for (int64_t i = 0; i < c.columns; ++i) {
    c.most[i] = -std::numeric_limits<T>::infinity();
    c.sum[i] = c.mean[i] = c.left[i] = 0;
  }
  for (T* sums : {c.m, c.c}) Clear(sums, place.n * c.Vp);
  for (int64_t j = call.first_key(place.begin) / kBlock; j <= tile.block; ++j) {
    const int64_t keys = tile.unit->count(j);
    const bool masked = MultiplyKeys<S>(d, call, in, tile, place, j, c);
    masked ? Softmax<true>(d, keys, scale, c) : Softmax<false>(d, keys, scale, c);
    Rescale(d, place.n, c);
    for (const auto& [weights, sums] : {std::pair{c.S, c.m}, {c.t, c.c}}) {
      MultiplySeen(d, masked, weights, 1, c.columns, c.v, c.Vp, keys, place.n, call.Dv, sums, c.Vp);
    }
  }
  for (int64_t i = 0; i < place.n; ++i) {
    const T left = c.left[i] / c.sum[i];
    const auto sum = hn::Set(d, c.sum[i]), of_m = hn::Set(d, left);
    for (int64_t e = i * c.Vp; e < (i + 1) * c.Vp; e += N) {
      const auto sum_of_values = hn::Load(d, c.m + e), m = hn::Div(sum_of_values, sum);
      hn::Store(hn::MulAdd(of_m, m, hn::Div(hn::Sub(sum_of_values, hn::Load(d, c.c + e)), sum)), d, c.c + e);
      hn::Store(m, d, c.m + e);
    }
    SetNumber(out.a, place.b, place.head_of(i), place.token_of(i), static_cast<double>(c.mean[i] + left));
    SetNumber(out.lse, place.b, place.head_of(i), place.token_of(i),
              static_cast<double>(c.most[i]) + std::log(static_cast<double>(c.sum[i])));
  }
  StoreTile<S>(d, place, c.c, c.Vp, out.o);
  StoreTile<T>(d, place, c.m, c.Vp, out.m);
}

mechanism::Reservation ForwardMemoryImpl(const Call& call, DType dtype) {
  mechanism::Reservation memory;
  WithTypes(dtype, [&](auto computed, auto)
                       HWY_ATTR { memory.per_thread = ForwardScratch<decltype(computed)>(call, nullptr).bytes; });
  return memory;
}

void ForwardImpl(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  ForwardMemoryImpl(call, in.q.dtype()).Make(ctx);
  WithTypes(in.q.dtype(), [&](auto computed, auto stored) HWY_ATTR {
    using T = decltype(computed);
    using S = decltype(stored);
    const hn::ScalableTag<T> d;
    const std::vector<std::vector<Unit>> waves = Waves(call.sequences, call.Hkv, 0);  // at most one
    std::vector<Tile> tiles;
    for (int64_t i = LongestUnit(waves); i-- > 0;) {  // the longest first
      for (const Unit& unit : waves[0]) {
        const UnitRows rows(call, unit);
        for (int64_t index = 0; rows.has(i) && index < rows.tiles(i); ++index) tiles.push_back({&unit, i, index});
      }
    }
    ctx.ParallelFor(std::ssize(tiles), [&](int64_t i, int worker) HWY_ATTR {
      ForwardScratch<T> scratch(call, ctx.Scratch(worker));
      ForwardTile<S>(d, call, in, out, tiles[static_cast<size_t>(i)], scratch);
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::parallax_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::parallax_attention {

HWY_EXPORT(ForwardImpl);
HWY_EXPORT(ForwardMemoryImpl);

void ComputeForward(Context& ctx, const Call& call, const Inputs& in, const Outputs& out) {
  HWY_DISPATCH_TABLE(ForwardImpl)[TargetIndex(ctx.allowed_targets())](ctx, call, in, out);
}
mechanism::Reservation ForwardMemory(const Context& ctx, const Call& call, DType dtype) {
  return HWY_DISPATCH_TABLE(ForwardMemoryImpl)[TargetIndex(ctx.allowed_targets())](call, dtype);
}

}  // namespace heed::parallax_attention
#endif  // HWY_ONCE
