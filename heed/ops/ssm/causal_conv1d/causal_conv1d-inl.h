// Common parts of the passes of the causal convolution: tiles of inputs, taps, silu.
//
// Compiled once per SIMD target.
#if defined(HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INL_H_
#undef HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INL_H_
#else
#define HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/strided-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::causal_conv1d::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

inline constexpr size_t kVectors = 4;  // vectors of outputs that share each load of a tap's weight

// Channels per task when channels are in vector lanes: rows of 1 KiB in f32 with consecutive vectors.
inline constexpr int64_t kLaneChannels = 256;
inline constexpr int64_t kRowChannels = 16;
inline int64_t BlockOf(const Problem& p) { return p.channels_in_lanes ? kLaneChannels : kRowChannels; }
inline int64_t NumBlocks(const Problem& p) { return (p.D + BlockOf(p) - 1) / BlockOf(p); }

// Stride between tokens in a tile with channels in lanes: one cache line more than a row, so that a column does not map
// to a single cache set.
inline constexpr size_t kTileRow = kLaneChannels + 16;

inline size_t PaddedChannels(const Problem& p) { return static_cast<size_t>((p.D + 63) / 64 * 64); }

// Channels [channel, channel + channels) of a sequence. With tokens in lanes a tile has one channel.
struct Channels {
  const Problem& p;
  const Sequence& s;
  int64_t channel, channels;
};

template <class S>
HWY_INLINE S* At(const Grid& g, const Channels& c, int64_t token) {
  return static_cast<S*>(const_cast<void*>(g.data)) + c.s.batch * g.batch + c.channel * g.channel +
         (c.s.first + token) * g.token;
}

// Address of element i of a channel's state.
template <class T>
HWY_INLINE T* StateAt(const Grid& g, const Channels& c, int64_t channel, int64_t i) {
  return static_cast<T*>(const_cast<void*>(g.data)) + c.s.state * g.batch + (c.channel + channel) * g.channel +
         i * g.token;
}

// Calls f(pointer to the lanes, their index in the tile, their stride, their number) for all vectors of tokens [begin,
// end), which must exist.
template <bool kChannels, class T, class S, class F>
HWY_INLINE void ForVectors(const Grid& g, const Channels& c, int64_t begin, int64_t end, const F& f) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  S* at = At<S>(g, c, begin);
  const auto tokens = static_cast<size_t>(end - begin);
  const auto lanes = kChannels ? static_cast<size_t>(c.channels) : tokens;
  const int64_t stride = kChannels ? g.channel : g.token;
  for (size_t t = 0; t < (kChannels ? tokens : 1); ++t) {
    S* row = at + static_cast<int64_t>(t) * g.token;
    for (size_t i = 0; i < lanes; i += N) {
      f(row + static_cast<int64_t>(i) * stride, t * kTileRow + i, stride, std::min(N, lanes - i));
    }
  }
}

// Loads inputs [begin, end) of a tile, widened; inputs before the first token come from the state. With tokens in
// lanes, vectors may write up to N - 1 elements beyond.
template <bool kChannels, class T>
HWY_NOINLINE HWY_ATTR void LoadInputs(const Channels& c, int64_t begin, int64_t end, T* HWY_RESTRICT tile) {
  const Problem& p = c.p;
  const hn::ScalableTag<T> d;
  const size_t token = kChannels ? kTileRow : 1;
  for (int64_t t = begin; t < std::min<int64_t>(end, 0); ++t) {
    T* to = tile + static_cast<size_t>(t - begin) * token;
    for (int64_t i = 0; i < (kChannels ? c.channels : 1); ++i) {
      to[i] = p.initial.data ? *StateAt<T>(p.initial, c, i, p.W - 1 + t) : T{0};
    }
  }
  const int64_t first = std::max<int64_t>(begin, 0);
  if (first >= end) return;
  T* HWY_RESTRICT to = tile + static_cast<size_t>(first - begin) * token;
  hs::WithStorage<T>(p.dtype, [&](auto tag) HWY_ATTR {
    using S = decltype(tag);
    ForVectors<kChannels, T, S>(p.x, c, first, end, [&](const S* from, size_t at, int64_t stride, size_t n) HWY_ATTR {
      hn::StoreU(hs::LoadStrided(d, from, stride, n), d, to + at);
    });
  });
}

// The weights [W + 1][padded D], widened, with the bias last.
template <class T>
HWY_NOINLINE HWY_ATTR void LoadWeights(const Problem& p, T* HWY_RESTRICT table) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(d);
  const size_t row = PaddedChannels(p);
  T* HWY_RESTRICT bias = table + static_cast<size_t>(p.W) * row;
  std::fill(bias, bias + row, T{0});
  for (int64_t c = 0; c < p.D; c += N) {
    const auto n = static_cast<size_t>(std::min(N, p.D - c));
    hs::WithStorage<T>(p.weight.dtype, [&](auto tag) HWY_ATTR {
      const auto* from = static_cast<const decltype(tag)*>(p.weight.data);
      hs::LoadColumns(d, from + c * p.weight.channel, p.weight.channel, p.weight.token, static_cast<size_t>(p.W), n,
                      table + c, row);
    });
    if (p.bias.data == nullptr) continue;
    hs::WithStorage<T>(p.bias.dtype, [&](auto tag) HWY_ATTR {
      const auto* from = static_cast<const decltype(tag)*>(p.bias.data);
      hn::StoreU(hs::LoadStrided(d, from + c * p.bias.channel, p.bias.channel, n), d, bias + c);
    });
  }
}

// A weight for the lanes: one channel's weight broadcast, or one per channel.
template <bool kChannels, class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Weight(D d, const T* from) {
  if constexpr (kChannels) {
    return hn::LoadU(d, from);
  } else {
    return hn::Set(d, *from);
  }
}

// sum[r] += sum_j w_j x_{r + j} for vectors r, which are a token apart, or whole vectors of tokens; consecutive taps
// are `next` weights apart. The sum is in order of j.
template <bool kChannels, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void AddTaps(D d, const T* HWY_RESTRICT x, const T* HWY_RESTRICT weight, int64_t next, int64_t W,
                        V (&sum)[kVectors]) {
  constexpr size_t kApart = kChannels ? kTileRow : hn::MaxLanes(D());
  for (int64_t j = 0; j < W; ++j) {
    const auto w = Weight<kChannels>(d, weight);
    HWY_UNROLL(4)
    for (size_t r = 0; r < kVectors; ++r) {
      sum[r] = hn::MulAdd(w, hn::LoadU(d, x + r * kApart), sum[r]);
    }
    x += kChannels ? kTileRow : 1;
    weight += next;
  }
}

// Calls f(index in the tile, channel of the first lane, vector 0 of the four) for all vectors of `tokens` tokens, four
// at a time; up to three of them, or some of their lanes, are beyond the end.
template <bool kChannels, class T, class F>
HWY_INLINE void ForTiles(const Channels& c, size_t tokens, const F& f) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const auto channel = static_cast<size_t>(c.channel);
  if constexpr (kChannels) {
    for (size_t t = 0; t < tokens; t += kVectors) {
      for (size_t i = 0; i < static_cast<size_t>(c.channels); i += N) {
        f(t * kTileRow + i, channel + i, t, i);
      }
    }
  } else {
    for (size_t t = 0; t < tokens; t += kVectors * N) f(t, channel, t, size_t{0});
  }
}

// Rounds four vectors of a tile and stores them to tokens of `g` from `begin` on; `t` and `i` are the arguments from
// ForTiles.
template <bool kChannels, class D, class S, class V = hn::Vec<D>>
HWY_INLINE void StoreVectors(D d, const Grid& g, const Channels& c, S* at, size_t tokens, size_t t, size_t i,
                             const V (&y)[kVectors]) {
  constexpr size_t N = hn::MaxLanes(D());
  HWY_UNROLL(4)
  for (size_t r = 0; r < kVectors; ++r) {
    const size_t token = t + r * (kChannels ? 1 : N);
    if (token >= tokens) return;
    S* to = at + static_cast<int64_t>(token) * g.token;
    if constexpr (kChannels) {
      hs::StoreStrided(d, y[r], to + static_cast<int64_t>(i) * g.channel, g.channel,
                       std::min(N, static_cast<size_t>(c.channels) - i));
    } else {
      hs::StoreStrided(d, y[r], to, g.token, std::min(N, tokens - token));
    }
  }
}

// 1 / (1 + exp(-p)) and 1 minus it, both without cancellation and without a positive exponent.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void Sigmoids(D d, V p, V& s, V& complement) {
  const auto one = hn::Set(d, hn::TFromD<D>{1});
  const V e = hs::Exp(d, hn::Neg(hn::Abs(p)));
  const V large = hs::FastDivide(d, one, hn::Add(one, e));
  const V small = hn::Mul(e, large);
  const auto negative = hn::Lt(p, hn::Zero(d));
  s = hn::IfThenElse(negative, small, large);
  complement = hn::IfThenElse(negative, large, small);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Silu(D d, V p) {
  V s, complement;
  Sigmoids(d, p, s, complement);
  return hn::Mul(p, s);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V SiluSlope(D d, V p) {
  V s, complement;
  Sigmoids(d, p, s, complement);
  return hn::MulAdd(hn::Mul(p, s), complement, s);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::causal_conv1d::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_SSM_CAUSAL_CONV1D_CAUSAL_CONV1D_INL_H_
