// What happens to a tile of logits between the two products: soft cap, biases,
// masks, maximum, exponentials, dropout. In that order, which is normative.
//
// Compiled once per SIMD target. A tile is s[key][lane], in cache; each step is
// one pass over it, and a plain tile takes the exponential pass alone.
#if defined(HEED_ENGINES_SOFTMAX_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_LOGITS_INL_H_
#undef HEED_ENGINES_SOFTMAX_LOGITS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_LOGITS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/rows-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/philox-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// What the passes need to know of a block's rows, by lane. Lanes beyond the last
// row see no key.
template <class T, size_t W>
struct Lanes {
  using TI = hwy::MakeSigned<T>;
  HWY_ALIGN TI first_begin[W], first_end[W], second_begin[W], second_end[W];
  HWY_ALIGN TI segment[W];
  HWY_ALIGN uint32_t position_low[W], head_row[W];  // dropout counter words
  HWY_ALIGN T slope[W];
  int64_t position[W];
  const void* bias[W];
  const void* mask[W];
};

// Keys [begin, end) of a tile whose row 0 is `origin`, and vectors [c0, c1).
struct Run {
  int64_t begin, end;
  size_t c0, c1;
};

// e^x for differences of logits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Weight(D d, V difference) {
  return hs::Exp2(d, hn::Mul(difference,
                         hn::Set(d, static_cast<hn::TFromD<D>>(hs::kLog2E))));
}

// f(at, key, c) for each vector of a run, `at` pointing at its logits.
template <class D, size_t W, class T, class F>
HWY_INLINE void ForVectors(D /*d*/, const Run& run, int64_t origin, T* HWY_RESTRICT s,
                           const F& f) {
  constexpr size_t N = hn::MaxLanes(D());
  for (int64_t j = run.begin; j < run.end; ++j) {
    T* HWY_RESTRICT row = s + static_cast<size_t>(j - origin) * W;
    for (size_t c = run.c0; c < run.c1; ++c) f(row + c * N, j, c);
  }
}

template <size_t W, class D, class T = hn::TFromD<D>>
HWY_INLINE void ApplySoftcap(D d, const Run& run, int64_t origin, double softcap,
                             T* HWY_RESTRICT s) {
  const auto cap = hn::Set(d, static_cast<T>(softcap));
  const auto inverse = hn::Set(d, static_cast<T>(1 / softcap));
  ForVectors<D, W>(d, run, origin, s, [&](T* at, int64_t, size_t) HWY_ATTR {
    hn::Store(hn::Mul(cap, hs::Tanh(d, hn::Mul(hn::Load(d, at), inverse))), d, at);
  });
}

// The distance is taken from the tile's own origin, where it is exact in T.
template <size_t W, class D, class T = hn::TFromD<D>>
HWY_INLINE void ApplyAlibi(D d, const Run& run, int64_t origin,
                           const Lanes<T, W>& lanes, T* HWY_RESTRICT s) {
  constexpr size_t N = hn::MaxLanes(D());
  for (size_t c = run.c0; c < run.c1; ++c) {
    HWY_ALIGN T from_origin[N];
    for (size_t i = 0; i < N; ++i) {
      from_origin[i] = static_cast<T>(lanes.position[c * N + i] - origin);
    }
    const auto slope = hn::Load(d, lanes.slope + c * N);
    const auto base = hn::Load(d, from_origin);
    for (int64_t j = run.begin; j < run.end; ++j) {
      T* at = s + static_cast<size_t>(j - origin) * W + c * N;
      const auto key = hn::Set(d, static_cast<T>(j - origin));
      const auto distance = hn::Abs(hn::Sub(base, key));
      hn::Store(hn::NegMulAdd(slope, distance, hn::Load(d, at)), d, at);
    }
  }
}

// A bias of -inf is a mask: it wins over whatever the logit is, NaN included.
template <size_t W, class D, class T = hn::TFromD<D>>
HWY_INLINE void ApplyBias(D d, const Run& run, int64_t origin, const Pairs& bias,
                          const Lanes<T, W>& lanes, T* HWY_RESTRICT s) {
  constexpr size_t N = hn::MaxLanes(D());
  const auto minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  ForPairs(
      d, lanes.bias, run.begin, run.end, run.c0, run.c1,
      [&](const void* row, int64_t j, size_t n) HWY_ATTR {
        return LoadPairs(d, bias.dtype, row, bias.key_stride, j, n);
      },
      [&](int64_t j, size_t c, hn::Vec<D> b) HWY_ATTR {
        T* at = s + static_cast<size_t>(j - origin) * W + c * N;
        const auto sum = hn::Add(hn::Load(d, at), b);
        hn::Store(hn::IfThenElse(hn::Eq(b, minus_inf), b, sum), d, at);
      });
}

template <size_t W, class D, class T = hn::TFromD<D>>
HWY_INLINE void ApplyMask(D d, const Run& run, int64_t origin, const Pairs& mask,
                          const Lanes<T, W>& lanes, T* HWY_RESTRICT s) {
  constexpr size_t N = hn::MaxLanes(D());
  const auto minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  ForPairs(
      d, lanes.mask, run.begin, run.end, run.c0, run.c1,
      [&](const void* row, int64_t j, size_t n) HWY_ATTR {
        return LoadMask(d, row, mask.key_stride, j, n);
      },
      [&](int64_t j, size_t c, hn::Vec<D> keep) HWY_ATTR {
        T* at = s + static_cast<size_t>(j - origin) * W + c * N;
        hn::Store(hn::IfThenElse(hn::Eq(keep, hn::Zero(d)), minus_inf,
                                 hn::Load(d, at)),
                  d, at);
      });
}

template <size_t W, class D, class T = hn::TFromD<D>>
HWY_INLINE void ApplySegments(D d, const Run& run, int64_t origin,
                              const int32_t* HWY_RESTRICT key_segments,
                              const Lanes<T, W>& lanes, T* HWY_RESTRICT s) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  const auto minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  ForVectors<D, W>(d, run, origin, s, [&](T* at, int64_t j, size_t c) HWY_ATTR {
    // A negative id matches nothing; lanes hold -1 then, and keys turn to -2.
    const int32_t id = key_segments[j];
    const auto key = hn::Set(di, static_cast<TI>(id < 0 ? -2 : id));
    const auto same = hn::Eq(hn::Load(di, lanes.segment + c * N), key);
    hn::Store(hn::IfThenElse(hn::RebindMask(d, same), hn::Load(d, at), minus_inf),
              d, at);
  });
}

// Masks keys outside each lane's two runs (unless the tile is full), and takes
// the maximum.
template <size_t W, bool kFull, class D, class T = hn::TFromD<D>,
          class V = hn::Vec<D>>
HWY_INLINE void MaskAndMax(D d, const Run& run, int64_t origin,
                           const Lanes<T, W>& lanes, T* HWY_RESTRICT s,
                           V* HWY_RESTRICT max) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToSigned<D> di;
  using TI = hn::TFromD<decltype(di)>;
  const auto minus_inf = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (size_t c = run.c0; c < run.c1; ++c) {
    const auto first_begin = hn::Load(di, lanes.first_begin + c * N);
    const auto first_end = hn::Load(di, lanes.first_end + c * N);
    const auto second_begin = hn::Load(di, lanes.second_begin + c * N);
    const auto second_end = hn::Load(di, lanes.second_end + c * N);
    V m = max[c];
    for (int64_t j = run.begin; j < run.end; ++j) {
      T* at = s + static_cast<size_t>(j - origin) * W + c * N;
      V x = hn::Load(d, at);
      if constexpr (!kFull) {
        const auto key = hn::Set(di, static_cast<TI>(j));
        const auto in_first =
            hn::And(hn::Ge(key, first_begin), hn::Lt(key, first_end));
        const auto in_second =
            hn::And(hn::Ge(key, second_begin), hn::Lt(key, second_end));
        x = hn::IfThenElse(hn::RebindMask(d, hn::Or(in_first, in_second)), x,
                           minus_inf);
        hn::Store(x, d, at);
      }
      m = hn::Max(x, m);
    }
    max[c] = m;
  }
}

// s = exp(s - shift), l += s, keys ascending. With kFlagMasked, masked pairs
// become -0, which ValueTile can tell from a weight that underflowed.
template <size_t W, int C, bool kFlagMasked, class D, class T = hn::TFromD<D>,
          class V = hn::Vec<D>>
HWY_INLINE void Exponentials(D d, size_t num_keys, T* HWY_RESTRICT s,
                             const V* HWY_RESTRICT shift, V* HWY_RESTRICT sum) {
  constexpr size_t N = hn::MaxLanes(D());
  V l[C], m[C];
  HWY_UNROLL(32)
  for (int c = 0; c < C; ++c) {
    l[c] = sum[c];
    m[c] = shift[c];
  }
  for (size_t j = 0; j < num_keys; ++j) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      T* HWY_RESTRICT at = s + j * W + static_cast<size_t>(c) * N;
      const V x = hn::Load(d, at);
      V p = Weight(d, hn::Sub(x, m[c]));
      l[c] = hn::Add(l[c], p);
      if constexpr (kFlagMasked) {
        const auto masked =
            hn::Eq(x, hn::Set(d, -std::numeric_limits<T>::infinity()));
        p = hn::IfThenElse(masked, hn::Set(d, T{-0.0}), p);
      }
      hn::Store(p, d, at);
    }
  }
  HWY_UNROLL(32)
  for (int c = 0; c < C; ++c) sum[c] = l[c];
}

// Zeroes the weights of dropped pairs; masked ones keep their flag.
template <size_t W, class D, class T = hn::TFromD<D>>
HWY_INLINE void ApplyDropout(D d, const Run& run, int64_t origin,
                             const Problem& problem, const Lanes<T, W>& lanes,
                             T* HWY_RESTRICT s) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::Rebind<uint32_t, D> du;
  for (size_t c = run.c0; c < run.c1; ++c) {
    const auto position = hn::Load(du, lanes.position_low + c * N);
    const auto head_row = hn::Load(du, lanes.head_row + c * N);
    HWY_ALIGN uint32_t words[4][N];
    for (int64_t j = run.begin; j < run.end; ++j) {
      if (j == run.begin || j % 4 == 0) {
        hn::Vec<decltype(du)> w[4];
        hs::Philox(du, static_cast<uint32_t>(j >> 2), position,
                                    head_row, problem.dropout_offset,
                                    problem.key_low, problem.key_high, w);
        for (int i = 0; i < 4; ++i) hn::Store(w[i], du, words[i]);
      }
      T* at = s + static_cast<size_t>(j - origin) * W + c * N;
      for (size_t i = 0; i < N; ++i) {
        if (words[j % 4][i] >= problem.keep_below && at[i] != 0) at[i] = 0;
      }
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_LOGITS_INL_H_
