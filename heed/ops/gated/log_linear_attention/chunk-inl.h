// A chunk of tokens of log-linear attention: its buffers, the states before it, products, and the states after it.
//
// Compiled once per SIMD target. States are in the places of the bits of a position p: place j is a run of 2^j tokens,
// [begin, begin + 2^j) with begin = p with all bits up to j cleared.
#if defined(HEED_OPS_GATED_LOG_LINEAR_ATTENTION_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_GATED_LOG_LINEAR_ATTENTION_CHUNK_INL_H_
#undef HEED_OPS_GATED_LOG_LINEAR_ATTENTION_CHUNK_INL_H_
#else
#define HEED_OPS_GATED_LOG_LINEAR_ATTENTION_CHUNK_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/ops/gated/log_linear_attention/log_linear_attention_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::log_linear_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

using hs::LoadRow;
using hs::Multiply;
using hs::MultiplyLower;
using hs::MultiplyPairs;
using hs::MultiplyUpper;
using hs::StoreRow;
using hs::TransposeRows;

// Calls f(T(), S()) for the types of the computation and of q, k and v.
template <class F>
HWY_INLINE void WithTypes(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double(), double());
  hs::WithStorage<float>(dtype, [&](auto stored) HWY_ATTR { f(float(), stored); });
}

constexpr int64_t kTokens = 64;  // per chunk
constexpr int64_t kMaxLevels = 64;

// Elements of a row, padded to whole vectors of any target.
inline int64_t Padded(int64_t size) { return (size + 15) / 16 * 16; }

// The level at which token t sees token s.
inline int64_t LevelOf(int64_t t, int64_t s) { return std::bit_width(static_cast<uint64_t>(t ^ s)); }

// The first token of the run at a place of p.
inline int64_t BeginOf(int64_t p, int64_t place) { return p >> (place + 1) << (place + 1); }

// Calls f(level, first, last) for the runs of tokens of a chunk at p that its token i sees, itself the last.
template <class F>
HWY_INLINE void ForRuns(int64_t p, int64_t i, const F& f) {
  const int64_t before = p % kTokens, place = before + i;  // before: tokens of the chunk that are not in this call
  for (int64_t level = 6; level > 0; --level) {
    if ((place >> (level - 1) & 1) == 0) continue;
    const int64_t first = (place >> level << level) - before, last = first + (int64_t{1} << (level - 1));
    if (last > 0) f(level, std::max<int64_t>(first, 0), last);
  }
  f(0, i, i + 1);
}

// The buffers of a thread. Rows of K or V channels are padded to Kp and Vp, with zeros; a T in a name: transposed, with
// rows of 64 tokens.
template <class T>
struct Chunk {
  int64_t Kp, Vp, L, bytes;
  T *q, *k, *v, *o, *qs, *kT;  // q is scaled; qs: q times a factor of each token
  T *pairs, *decay, *levels;   // [64, 64], decay[i][r]: the product of the decays of tokens r + 1 to i; [64, L]
  T *since, *gate;             // [64]: the product of all decays up to a token, its own one
  T* sum;                      // [K, V]
  T* memory;                   // states by place
  T* state[kMaxLevels];
  T factor[kMaxLevels];  // the decays since a state was made
  // For gradients.
  T *d_o, *d_oT, *vT, *dq, *dk, *dv, *dT, *dpairs, *dlevels, *dmemory, *made;
  double* db;
  T* dstate[kMaxLevels];

  // `made`: the number of states that the backward pass keeps. With a null base only `bytes` is set.
  Chunk(const Call& call, void* base, bool backward, int64_t num_made)
      : Kp(Padded(call.K)), Vp(Padded(call.V)), L(call.L) {
    Carver carver(base);
    const int64_t widest = std::max(Kp, Vp), places = std::min(L, kMaxLevels);
    for (T** rows : {&q, &k, &qs}) carver.Next(*rows, kTokens * Kp);
    for (T** rows : {&v, &o}) carver.Next(*rows, kTokens * Vp);
    carver.Next(kT, Kp * kTokens);
    for (T** square : {&pairs, &decay}) carver.Next(*square, kTokens * kTokens);
    carver.Next(levels, kTokens * L);
    carver.Next(since, kTokens);
    carver.Next(gate, kTokens);
    carver.Next(sum, Kp * Vp);
    carver.Next(memory, places * Kp * Vp);
    if (backward) {
      for (T** rows : {&d_o, &dv}) carver.Next(*rows, kTokens * Vp);
      for (T** rows : {&dq, &dk}) carver.Next(*rows, kTokens * Kp);
      for (T** rows : {&d_oT, &vT, &dT}) carver.Next(*rows, widest * kTokens);
      carver.Next(dpairs, kTokens * kTokens);
      carver.Next(dlevels, kTokens * L);
      carver.Next(db, kTokens);
      carver.Next(dmemory, places * Kp * Vp);
      carver.Next(made, num_made * Kp * Vp);
    }
    bytes = carver.bytes();
    if (base == nullptr) return;
    for (int64_t j = 0; j < places && backward; ++j) dstate[j] = dmemory + j * Kp * Vp;
  }

  T Scale(int64_t token, int64_t level) const { return levels[token * L + level]; }

  // Reads the states before a sequence.
  void LoadStates(const Inputs& in, int64_t n, int64_t h, int64_t p) {
    const ConstTensorView& t = in.initial_state;
    for (int64_t j = 0; j < std::min(L, kMaxLevels); ++j) state[j] = memory + j * Kp * Vp;
    for (int64_t j = 0; p >> j != 0; ++j) {
      if ((p >> j & 1) == 0) continue;
      const T* from = t.as<T>() + n * t.stride(0) + h * t.stride(1) + j * t.stride(2);
      std::memset(state[j], 0, static_cast<size_t>(Kp * Vp) * sizeof(T));
      for (int64_t i = 0; i < t.size(3); ++i) {
        for (int64_t c = 0; c < t.size(4); ++c) state[j][i * Vp + c] = from[i * t.stride(3) + c * t.stride(4)];
      }
      factor[j] = 1;
    }
  }
};

// Loads `count` tokens from `token` on. A gate above 1 counts as 1.
template <class S, class D, class T = hn::TFromD<D>>
HWY_INLINE void LoadChunk(D d, const Call& call, const Inputs& in, int64_t b, int64_t token, int64_t count, int64_t h,
                          int64_t kh, Chunk<T>& chunk) {
  const int64_t K = call.K, V = call.V, Kp = chunk.Kp, Vp = chunk.Vp;
  const auto row = [&](const ConstTensorView& t, int64_t i, int64_t head) {
    return t.as<S>() + b * t.stride(0) + (token + i) * t.stride(1) + head * t.stride(2);
  };
  const T scale = static_cast<T>(call.scale);
  for (int64_t i = 0; i < count; ++i) {
    LoadRow(d, row(in.q, i, kh), K, Kp, chunk.q + i * Kp);
    for (int64_t c = 0; c < K; ++c) chunk.q[i * Kp + c] *= scale;
    LoadRow(d, row(in.k, i, kh), K, Kp, chunk.k + i * Kp);
    LoadRow(d, row(in.v, i, h), V, Vp, chunk.v + i * Vp);
    const ConstTensorView &l = in.level_scales, &g = in.log_decay;
    for (int64_t level = 0; level < call.L; ++level) {
      const int64_t at = b * l.stride(0) + (token + i) * l.stride(1) + h * l.stride(2) + level * l.stride(3);
      chunk.levels[i * call.L + level] = static_cast<T>(LoadAsDouble(l.dtype(), l.data(), at));
    }
    T gate = 1;
    if (g.present()) {
      const int64_t at = b * g.stride(0) + (token + i) * g.stride(1) + h * g.stride(2);
      const double x = LoadAsDouble(g.dtype(), g.data(), at);
      gate = static_cast<T>(std::exp(x > 0 ? 0 : x));
    }
    chunk.gate[i] = gate;
    chunk.since[i] = i == 0 ? gate : chunk.since[i - 1] * gate;
    T* HWY_RESTRICT decays = chunk.decay + i * kTokens;
    for (int64_t r = 0; r < i; ++r) decays[r] = decays[r - kTokens] * gate;
    decays[i] = 1;
  }
}

// qs: the queries of a chunk at p as the state of a place sees them.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void WeightQueries(D d, const Call& call, int64_t p, int64_t count, int64_t place, Chunk<T>& chunk) {
  constexpr int64_t N = hn::MaxLanes(D());
  const int64_t begin = BeginOf(p, place);
  for (int64_t i = 0; i < count; ++i) {
    const T weight = chunk.Scale(i, LevelOf(p + i, begin)) * (chunk.since[i] * chunk.factor[place]);
    const auto factor = hn::Set(d, weight);
    for (int64_t c = 0; c < call.K; c += N) {
      hn::Store(hn::Mul(factor, hn::Load(d, chunk.q + i * chunk.Kp + c)), d, chunk.qs + i * chunk.Kp + c);
    }
  }
}

// The states after `count` tokens from p on. `target(place)` is where a new state goes, whose value the caller may
// keep. From the highest place down, so that what a state adds to a higher one is read before the state is replaced.
template <class D, class F, class T = hn::TFromD<D>>
HWY_INLINE void Merge(D d, int64_t K, int64_t V, int64_t p, int64_t count, Chunk<T>& chunk, const F& target) {
  constexpr int64_t N = hn::MaxLanes(D());
  const int64_t Kp = chunk.Kp, Vp = chunk.Vp, after = p + count;
  const T all = chunk.since[count - 1];
  for (int64_t j = std::bit_width(static_cast<uint64_t>(after)); j-- > 0;) {
    if ((after >> j & 1) == 0) continue;
    const int64_t begin = BeginOf(after, j), end = begin + (int64_t{1} << j);
    if (end <= p) {
      chunk.factor[j] *= all;
      continue;
    }
    T* HWY_RESTRICT sum = chunk.sum;
    std::memset(sum, 0, static_cast<size_t>(K * Vp) * sizeof(T));
    for (int64_t old = 0; old <= j && p >> old != 0; ++old) {
      if ((p >> old & 1) == 0 || BeginOf(p, old) < begin) continue;
      const T weight = chunk.factor[old] * all;
      if (weight == 0) continue;
      const auto factor = hn::Set(d, weight);
      for (int64_t at = 0; at < K * Vp; at += N) {
        hn::Store(hn::MulAdd(factor, hn::LoadU(d, chunk.state[old] + at), hn::Load(d, sum + at)), d, sum + at);
      }
    }
    const int64_t first = std::max(begin, p) - p, last = std::min(end, after) - p;
    const T* HWY_RESTRICT decays = chunk.decay + (count - 1) * kTokens;
    for (int64_t i = first; i < last; ++i) {
      const auto factor = hn::Set(d, decays[i]);
      for (int64_t c = 0; c < K; c += N) {
        hn::Store(hn::Mul(factor, hn::Load(d, chunk.k + i * Kp + c)), d, chunk.qs + i * Kp + c);
      }
    }
    Multiply(d, chunk.qs + first * Kp, 1, Kp, chunk.v + first * Vp, Vp, last - first, K, V, sum, Vp);
    T* to = target(j);
    std::memcpy(to, sum, static_cast<size_t>(K * Vp) * sizeof(T));
    chunk.state[j] = to;
    chunk.factor[j] = 1;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::log_linear_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_GATED_LOG_LINEAR_ATTENTION_CHUNK_INL_H_
