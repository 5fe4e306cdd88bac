// The passes over a tile of logits before its exponentials: soft cap, biases, masks, maximum. Their order is normative.
//
// Compiled once per SIMD target. A tile is s[key][lane], in cache. Each step is one pass over it, and a plain tile
// needs none. The steps are called and not inlined, because a call costs nothing beside a pass.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_LOGITS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_LOGITS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_LOGITS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/block/lanes-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/block/rows-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Computes x = f(x, key, c) for each vector of a run, where c counts its C vectors from run.c0. max[c] becomes the
// maximum of the results.
template <size_t W, int C, class D, class T, class V = hn::Vec<D>, class F>
HWY_INLINE void Rewrite(D d, const Run& run, int64_t origin, T* HWY_RESTRICT s, V* HWY_RESTRICT max, const F& f) {
  constexpr size_t N = hn::MaxLanes(D());
  V m[C];
  HWY_UNROLL(4)
  for (int c = 0; c < C; ++c) m[c] = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (int64_t j = run.begin; j < run.end; ++j) {
    T* HWY_RESTRICT row = s + static_cast<size_t>(j - origin) * W + run.c0 * N;
    HWY_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      T* HWY_RESTRICT at = row + static_cast<size_t>(c) * N;
      const V x = f(hn::Load(d, at), j, c);
      hn::Store(x, d, at);
      m[c] = hn::Max(x, m[c]);
    }
  }
  HWY_UNROLL(4)
  for (int c = 0; c < C; ++c) max[c] = m[c];
}

// The soft cap is cap tanh(logit / cap) = cap TanhScaled(logit factor) with factor = 2 log2(e) / cap. An ordinary
// factor is multiplied into the queries; an extreme one would overflow there.
inline double SoftcapFactor(double softcap) { return 2 * hs::kLog2E / softcap; }

inline bool SoftcapRidesOnQueries(double softcap) { return softcap >= 1.0 / 1024 && softcap <= 1024.0 * 1024; }

// From these caps on, x / cap of ordinary logits would be subnormal. A logit below cap 2^-14 stays x to the last
// bit.
template <class T>
inline constexpr double kFarCap = sizeof(T) == 4 ? 0x1p64 : 0x1p512;

// Applies the soft cap. Stores its slope, 1 - tanh^2, in `slopes` unless that is null.
template <size_t W, int C, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void ApplySoftcap(D d, const Run& run, int64_t origin, double softcap, T* HWY_RESTRICT s,
                               T* HWY_RESTRICT slopes, V* HWY_RESTRICT max) {
  constexpr size_t N = hn::MaxLanes(D());
  const V cap = hn::Set(d, static_cast<T>(softcap));
  const V factor =
      SoftcapRidesOnQueries(softcap) ? hn::Set(d, T{1}) : hn::Set(d, static_cast<T>(SoftcapFactor(softcap)));
  const auto put_slope = [&](V tanh, int64_t j, int c) HWY_ATTR {
    hn::Store(hn::NegMulAdd(tanh, tanh, hn::Set(d, T{1})), d,
              slopes + static_cast<size_t>(j - origin) * W + (run.c0 + static_cast<size_t>(c)) * N);
  };
  if (HWY_UNLIKELY(softcap > kFarCap<T>)) {
    const V linear = hn::Set(d, static_cast<T>(softcap * 0x1p-14));
    Rewrite<W, C>(d, run, origin, s, max, [&](V x, int64_t j, int c) HWY_ATTR {
      const V tanh = hs::Tanh(d, hn::Div(x, cap));
      if (slopes != nullptr) put_slope(tanh, j, c);
      return hn::IfThenElse(hn::Lt(hn::Abs(x), linear), x, hn::Mul(cap, tanh));
    });
    return;
  }
  if (slopes == nullptr) {
    Rewrite<W, C>(d, run, origin, s, max,
                  [&](V x, int64_t, int) HWY_ATTR { return hn::Mul(cap, hs::TanhScaled(d, hn::Mul(x, factor))); });
    return;
  }
  Rewrite<W, C>(d, run, origin, s, max, [&](V x, int64_t j, int c) HWY_ATTR {
    const V tanh = hs::TanhScaled(d, hn::Mul(x, factor));
    put_slope(tanh, j, c);
    return hn::Mul(cap, tanh);
  });
}

// Adds -slope |position - key|. Both are counted from the tile's start on the grid: small numbers, exact in T, and the
// same whichever block computes the tile.
template <int C, class D>
struct Alibi {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D());

  template <size_t W>
  HWY_INLINE Alibi(D d, const Run& run, int64_t tile_grid, const Lanes<T, W>& lanes) : grid(tile_grid) {
    HWY_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      const size_t lane = (run.c0 + static_cast<size_t>(c)) * N;
      HWY_ALIGN T from_grid[N];
      for (size_t i = 0; i < N; ++i) {
        from_grid[i] = static_cast<T>(lanes.position[lane + i] - grid);
      }
      slope[c] = hn::Load(d, lanes.slope + lane);
      base[c] = hn::Load(d, from_grid);
    }
  }

  HWY_INLINE V operator()(V x, int64_t key, int c) const {
    const V at = hn::Set(D(), static_cast<T>(key - grid));
    return hn::NegMulAdd(slope[c], hn::Abs(hn::Sub(base[c], at)), x);
  }

  int64_t grid;
  V slope[C], base[C];
};

// Returns whether any pair of a run is in the span of the relative bias.
template <int C, size_t N, class T, size_t W>
HWY_INLINE bool InRelativeSpan(const Run& run, int64_t span, const Lanes<T, W>& lanes, size_t num_rows) {
  const size_t begin = run.c0 * N, end = std::min(begin + C * N, num_rows);
  for (size_t lane = begin; lane < end; ++lane) {
    if (lanes.position[lane] >= run.begin && lanes.position[lane] - run.end < span - 1) return true;
  }
  return false;
}

// Adds the relative bias b[head, position - key]. Vectors whose rows are consecutive positions of one head load it as
// it is stored, others gather it. A bias of -inf is a mask, as in AddBias.
template <int C, bool kFlagMasked, class D>
struct Relative {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  using DI = hn::RebindToSigned<D>;
  using TI = hn::TFromD<DI>;
  static constexpr auto N = static_cast<int64_t>(hn::MaxLanes(D()));
  static_assert(N <= RelativeBias::kPad);

  template <size_t W>
  HWY_INLINE Relative(D, const Run& run, int64_t tile_grid, const RelativeBias& bias, const Lanes<T, W>& of_rows)
      : grid(tile_grid), span(bias.span), data(bias.Data<T>()) {
    HWY_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      const size_t vector = run.c0 + static_cast<size_t>(c), lane = vector * N;
      in_order[c] = (of_rows.in_order >> vector & 1) != 0;
      rows[c] = data + of_rows.relative_head[lane];
      first[c] = FromGrid(of_rows.position[lane]);
      heads[c] = of_rows.relative_head + lane;
      if (in_order[c]) continue;
      for (int64_t i = 0; i < N; ++i) distances[c][i] = static_cast<TI>(FromGrid(of_rows.position[lane + i]) + 1);
    }
  }

  HWY_INLINE V operator()(V x, int64_t key, int c) const {
    const D d;
    const DI di;
    V b;
    if (HWY_LIKELY(in_order[c])) {
      b = hn::LoadU(d, rows[c] + std::clamp(first[c] - (key - grid), -N, span));
    } else {
      const auto at = hn::Sub(hn::Load(di, distances[c]), hn::Set(di, static_cast<TI>(key - grid)));
      const auto inside = hn::Clamp(at, hn::Zero(di), hn::Set(di, static_cast<TI>(span + 1)));
      b = hn::GatherIndex(d, data - 1, hn::Add(hn::Load(di, heads[c]), inside));
    }
    const V sum = hn::Add(x, b);
    if constexpr (!kFlagMasked) return sum;
    return hn::IfThenElse(hn::Eq(b, hn::Set(d, -std::numeric_limits<T>::infinity())), b, sum);
  }

  // Returns the distance from the start of the tile on the grid. One that is out of the span for all keys of a tile is
  // replaced by a near one that is, too.
  HWY_INLINE int64_t FromGrid(int64_t position) const {
    return std::clamp<int64_t>(position - grid, -N, span + kMostTileKeys);
  }
  static constexpr int64_t kMostTileKeys = 1024;

  int64_t grid, span;
  const T* data;
  bool in_order[C];
  const T* rows[C];
  int64_t first[C];
  const TI* heads[C];
  HWY_ALIGN TI distances[C][N];  // plus 1: indices from data - 1 are not negative
};

// Computes x = F()(x, value of the pair) for the keys [begin, end) of one vector of lanes, which are `stride` elements
// apart; rows are the lanes' rows of a broadcast tensor. Returns the maximum of the results. One instantiation serves
// blocks of all widths.
template <class F, class D, class T, class V = hn::Vec<D>, class Load>
HWY_NOINLINE V RewriteByPairs(D d, int64_t begin, int64_t end, const void* const* HWY_RESTRICT rows, const Load& load,
                              size_t stride, T* HWY_RESTRICT s) {
  const V none = hn::Set(d, -std::numeric_limits<T>::infinity());
  V m[4] = {none, none, none, none};  // a single chain would run at its latency
  ForPairs(d, rows, begin, end, load, [&](int64_t j, V value, size_t i) HWY_ATTR {
    T* HWY_RESTRICT at = s + static_cast<size_t>(j - begin) * stride;
    const V x = F()(d, hn::Load(d, at), value);
    hn::Store(x, d, at);
    m[i % 4] = hn::Max(x, m[i % 4]);
  });
  return hn::Max(hn::Max(m[0], m[1]), hn::Max(m[2], m[3]));
}

// Does this for the C vectors of a run.
template <class F, size_t W, int C, class D, class T, class V = hn::Vec<D>, class Load>
HWY_INLINE void RewriteRunByPairs(D d, const Run& run, int64_t origin, const void* const* rows, const Load& load, T* s,
                                  V* max) {
  for (int c = 0; c < C; ++c) {
    const size_t lane = (run.c0 + static_cast<size_t>(c)) * hn::MaxLanes(D());
    max[c] = RewriteByPairs<F>(d, run.begin, run.end, rows + lane, load, W,
                               s + static_cast<size_t>(run.begin - origin) * W + lane);
  }
}

// Adds a bias. A bias of -inf is a mask and wins over any logit, NaN and infinity included. This costs a tenth of the
// time of plain attention, so only the pass that flags masked pairs does it.
template <bool kFlagMasked>
struct AddBias {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V x, V b) const {
    const V sum = hn::Add(x, b);
    if constexpr (!kFlagMasked) return sum;
    return hn::IfThenElse(hn::Eq(b, hn::Set(d, -std::numeric_limits<hn::TFromD<D>>::infinity())), b, sum);
  }
};

template <size_t W, int C, bool kFlagMasked, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void ApplyBias(D d, const Run& run, int64_t origin, const Pairs& bias, const Lanes<T, W>& lanes,
                            T* HWY_RESTRICT s, V* HWY_RESTRICT max) {
  using F = AddBias<kFlagMasked>;
  if (bias.key_stride == 1 && ContiguousPairs<D>::Loads(bias.dtype)) {
    RewriteRunByPairs<F, W, C>(d, run, origin, lanes.bias, ContiguousPairs<D>{bias.dtype}, s, max);
  } else {
    RewriteRunByPairs<F, W, C>(d, run, origin, lanes.bias, AnyPairs<D>{bias.dtype, bias.key_stride}, s, max);
  }
}

struct DropMasked {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, V x, V keep) const {
    const V minus_inf = hn::Set(d, -std::numeric_limits<hn::TFromD<D>>::infinity());
    return hn::IfThenElse(hn::Eq(keep, hn::Zero(d)), minus_inf, x);
  }
};

template <size_t W, int C, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void ApplyMask(D d, const Run& run, int64_t origin, const Pairs& mask, const Lanes<T, W>& lanes,
                            T* HWY_RESTRICT s, V* HWY_RESTRICT max) {
  if (mask.key_stride == 1) {
    RewriteRunByPairs<DropMasked, W, C>(d, run, origin, lanes.mask, ContiguousMask<D>(), s, max);
  } else {
    RewriteRunByPairs<DropMasked, W, C>(d, run, origin, lanes.mask, AnyPairs<D>{DType::kBool, mask.key_stride}, s, max);
  }
}

// Masks keys whose bit is not set in kept[(key - origin) / bits of T][lane].
template <size_t W, int C, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void ApplyPattern(D d, const Run& run, int64_t origin, const hwy::MakeUnsigned<T>* HWY_RESTRICT kept,
                               T* HWY_RESTRICT s, V* HWY_RESTRICT max) {
  constexpr size_t N = hn::MaxLanes(D()), kBits = 8 * sizeof(T);
  const hn::RebindToUnsigned<D> du;
  using TU = hn::TFromD<decltype(du)>;
  const V minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  Rewrite<W, C>(d, run, origin, s, max, [&](V x, int64_t j, int c) HWY_ATTR {
    const auto key = static_cast<size_t>(j - origin);
    const auto word = hn::Load(du, kept + key / kBits * W + (run.c0 + static_cast<size_t>(c)) * N);
    const auto bit = hn::Set(du, static_cast<TU>(TU{1} << (key % kBits)));
    return hn::IfThenElse(hn::RebindMask(d, hn::TestBit(word, bit)), x, minus_inf);
  });
}

template <size_t W, int C, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void ApplySegments(D d, const Run& run, int64_t origin, const int32_t* HWY_RESTRICT key_segments,
                                const Lanes<T, W>& lanes, T* HWY_RESTRICT s, V* HWY_RESTRICT max) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  const V minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  Rewrite<W, C>(d, run, origin, s, max, [&](V x, int64_t j, int c) HWY_ATTR {
    // A negative segment id matches nothing: lanes then hold -1, and keys -2.
    const int32_t id = key_segments[j];
    const auto key = hn::Set(di, static_cast<TI>(id < 0 ? -2 : id));
    const auto own = hn::Load(di, lanes.segment + (run.c0 + static_cast<size_t>(c)) * N);
    return hn::IfThenElse(hn::RebindMask(d, hn::Eq(own, key)), x, minus_inf);
  });
}

// Masks keys outside each lane's runs. With kRuns == 1 only the second run may be non-empty.
template <size_t W, int C, int kRuns, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void ApplyRuns(D d, const Run& run, int64_t origin, const Lanes<T, W>& lanes, T* HWY_RESTRICT s,
                            V* HWY_RESTRICT max) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  const V minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  Rewrite<W, C>(d, run, origin, s, max, [&](V x, int64_t j, int c) HWY_ATTR {
    const size_t lane = (run.c0 + static_cast<size_t>(c)) * N;
    const auto key = hn::Set(di, static_cast<TI>(j));
    auto keep = hn::And(hn::Ge(key, hn::Load(di, lanes.second_begin + lane)),
                        hn::Lt(key, hn::Load(di, lanes.second_end + lane)));
    if constexpr (kRuns == 2) {
      keep = hn::Or(keep, hn::And(hn::Ge(key, hn::Load(di, lanes.first_begin + lane)),
                                  hn::Lt(key, hn::Load(di, lanes.first_end + lane))));
    }
    return hn::IfThenElse(hn::RebindMask(d, keep), x, minus_inf);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_LOGITS_INL_H_
