// A chunk of tokens of Titans' linear memory: its coefficients, what the queries read, and the state after it.
//
// Compiled once per SIMD target. With the state M, S before a chunk, lr_s = 2 theta_s, P_ts = <q_t, k_s>, and the
// gradients g at A (common/test_time_training-inl.h), momentum and memory are linear in what was before:
//
//   S_t = h_t S - sum_{s <= t} H_ts lr_s k_s g_s^T
//   M_t = b_t M + f_t S - sum_{s <= t} C_ts lr_s k_s g_s^T
//   y_t = b_t q_t M + f_t q_t S - sum_{s <= t} C_ts lr_s P_ts g_s
//
// The coefficients of token t follow from those of t - 1, without divisions: with those before the chunk b = h = 1 and
// f = 0, and with H_tt = C_tt = 1,
//
//   h_t = eta_t h_{t-1},  H_ts = eta_t H_{t-1,s},  b_t = (1 - alpha_t) b_{t-1},
//   f_t = (1 - alpha_t) f_{t-1} + h_t,  C_ts = (1 - alpha_t) C_{t-1,s} + H_ts.
#if defined(HEED_OPS_DELTA_TITANS_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_DELTA_TITANS_CHUNK_INL_H_
#undef HEED_OPS_DELTA_TITANS_CHUNK_INL_H_
#else
#define HEED_OPS_DELTA_TITANS_CHUNK_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

#include "heed/core/carver.h"
#include "heed/ops/delta/common/test_time_training-inl.h"
#include "heed/ops/delta/titans/titans_internal.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::titans::HWY_NAMESPACE {
using namespace test_time_training::HWY_NAMESPACE;  // NOLINT: what both mechanisms do

// With a null base only `bytes` is set.
template <class T>
struct Buffers : Chunk<T> {
  int64_t bytes;
  T *keep, *eta;  // [16]: keep = 1 - alpha
  T *b, *f, *h;   // [16]
  T *C, *H;       // [16, 16]: 0 for s > t
  T *qM, *qS;     // [16, Vp]
  T *M, *S, *A;   // the parts of the state
  T *dM, *dS, *dA;
  T *kdM, *kdS;          // [16, Vp]
  T *dyg, *dC;           // [16, 16]: <dy_t, g_s>, and the gradient of C
  T *db, *df, *dH_last;  // [16]: dH_last is that of the last row of H

  Buffers(const Call& call, void* base, bool backward, int64_t kept_states, int64_t tokens)
      : Chunk<T>(call, call.K, 3, DividesMiniBatches(call) ? 3 : 2) {
    Carver carver(base);
    this->Carve(carver, backward, kept_states, tokens);
    for (T** row : {&keep, &eta, &b, &f, &h}) carver.Next(*row, kTokens);
    for (T** square : {&C, &H}) carver.Next(*square, kTokens * kTokens);
    for (T** read : {&qM, &qS}) carver.Next(*read, kTokens * this->Vp);
    M = this->parts[0];
    S = this->parts[1];
    A = this->parts[2];
    if (backward) {
      for (T** read : {&kdM, &kdS}) carver.Next(*read, kTokens * this->Vp);
      for (T** square : {&dyg, &dC}) carver.Next(*square, kTokens * kTokens);
      for (T** row : {&db, &df, &dH_last}) carver.Next(*row, kTokens);
      dM = this->d_parts[0];
      dS = this->d_parts[1];
      dA = this->d_parts[2];
    }
    bytes = carver.bytes();
  }
};

// The state before the first token of a sequence, and the norm of a head.
template <class T>
HWY_NOINLINE void Begin(const Call& call, const Inputs& in, int64_t n, int64_t h, Buffers<T>& c) {
  LoadPart(in.initial_state, c, n, h, 0, c.M);
  LoadPart(in.initial_state, c, n, h, 1, c.S);
  LoadPart(call.offsets[static_cast<size_t>(n)] > 0 ? in.initial_state : ConstTensorView(), c, n, h, 2, c.A);
  LoadNorm(in.weight, in.bias, h, c);
}

template <class D, class T = hn::TFromD<D>>
HWY_INLINE void FillCoefficients(D d, Buffers<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  Clear(c.C, kTokens * kTokens);
  Clear(c.H, kTokens * kTokens);
  T b = 1, f = 0, h = 1;
  for (int64_t t = 0; t < c.count; ++t) {
    T *C = c.C + t * kTokens, *H = c.H + t * kTokens;
    const auto eta = hn::Set(d, c.eta[t]), keep = hn::Set(d, c.keep[t]);
    for (int64_t s = 0; s < t; s += N) {
      const auto before = Valid(d, s, t);
      const auto momentum = hn::IfThenElseZero(before, hn::Mul(eta, hn::Load(d, H - kTokens + s)));
      hn::Store(momentum, d, H + s);
      hn::Store(hn::IfThenElseZero(before, hn::MulAdd(keep, hn::Load(d, C - kTokens + s), momentum)), d, C + s);
    }
    C[t] = H[t] = 1;
    h *= c.eta[t];
    b *= c.keep[t];
    f = c.keep[t] * f + h;
    c.b[t] = b;
    c.f[t] = f;
    c.h[t] = h;
  }
}

// Loads the chunk of a sequence from `token` on, whose place in its mini-batch is `offset`.
template <class Stored, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadChunk(D d, const Call& call, const Inputs& in, int64_t b, int64_t token, int64_t offset,
                            int64_t left, int64_t h, Buffers<T>& c) {
  LoadRows<Stored>(d, call, in, b, token, offset, left, h, c);
  for (int64_t i = 0; i < c.count; ++i) {
    c.lr[i] = 2 * NumberAt<T>(in.theta, b, token + i, h);
    c.keep[i] = 1 - NumberAt<T>(in.alpha, b, token + i, h);
    c.eta[i] = NumberAt<T>(in.eta, b, token + i, h);
  }
  FillCoefficients(d, c);
  c.trained = c.begins ? c.M : c.A;
}

// weighted[t][s] = -C_ts columns[s] pairs[t][s] for s <= t; -0 after.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void MixPairs(D d, const Buffers<T>& c, const T* columns, const T* pairs) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t t = 0; t < c.count; ++t) {
    for (int64_t s = 0; s < kTokens; s += N) {
      const int64_t at = t * kTokens + s;
      auto x = hn::Neg(hn::Mul(hn::Load(d, c.C + at), hn::Load(d, pairs + at)));
      if (columns != nullptr) x = hn::Mul(x, hn::Load(d, columns + s));
      hn::Store(hn::IfThenElse(Valid(d, s, t + 1), x, hn::Set(d, T{-0.0})), d, c.weighted + at);
    }
  }
}

// y, and its LN.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ReadQueries(D d, const Call& call, Buffers<T>& c) {
  ReadRows(d, c, c.q, c.M, c.qM);
  ReadRows(d, c, c.q, c.S, c.qS);
  for (int64_t t = 0; t < c.count; ++t) {
    Scale(d, c.b[t], c.qM + t * c.Vp, c.Vp, c.y + t * c.Vp);
    AddScaled(d, c.f[t], c.qS + t * c.Vp, c.Vp, c.y + t * c.Vp);
  }
  hs::MultiplyPairs(d, c.q, c.Kp, c.kT, c.rows, c.count, c.pairs, kTokens);
  MixPairs(d, c, c.lr, c.pairs);
  hs::MultiplyLower(d, c.weighted, kTokens, c.g, c.Vp, c.count, c.Vp, c.y, c.Vp);
  for (int64_t t = 0; t < c.count; ++t) {
    c.yr[t] = Normalise(d, c.y + t * c.Vp, c.K, c.Vp, call.eps, c.yx + t * c.Vp);
  }
}

// to = a to + b from, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void Combine(D d, T a, T b, const T* HWY_RESTRICT from, int64_t n, T* HWY_RESTRICT to) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto of_to = hn::Set(d, a), of_from = hn::Set(d, b);
  for (int64_t i = 0; i < n; i += N) {
    hn::Store(hn::MulAdd(of_from, hn::Load(d, from + i), hn::Mul(of_to, hn::Load(d, to + i))), d, to + i);
  }
}

// The state after the tokens of a chunk.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Advance(D d, Buffers<T>& c) {
  const int64_t last = c.count - 1;
  if (c.begins && !c.ends) Copy(c.M, c.size, c.A);
  Combine(d, c.b[last], c.f[last], c.S, c.size, c.M);
  Scale(d, c.h[last], c.S, c.size, c.S);
  for (const auto& [coefficients, part] : {std::pair{c.C, c.M}, {c.H, c.S}}) {
    for (int64_t s = 0; s < c.count; ++s) {
      Scale(d, -coefficients[last * kTokens + s] * c.lr[s], c.k + s * c.Kp, c.Kp, c.scaled + s * c.Kp);
    }
    hs::Multiply(d, c.scaled, 1, c.Kp, c.g, c.Vp, c.count, c.rows, c.Vp, part, c.Vp);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::titans::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_DELTA_TITANS_CHUNK_INL_H_
