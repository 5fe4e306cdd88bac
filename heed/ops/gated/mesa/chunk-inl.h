// A chunk of tokens of MesaNet: its buffers, products with its states, the solver, and the state after it.
//
// Compiled once per SIMD target. A chunk has the state S before it, so that its token t has
//
//   S_t = a_t S + sum_{s <= t} D_ts beta_s k_s [k_s; v_s]^T
//
// with the decays a_t since the chunk began and D_ts between two tokens. No S_t is ever made: products with S_t are
// those with S and with the tokens of the chunk.
#if defined(HEED_OPS_GATED_MESA_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_GATED_MESA_CHUNK_INL_H_
#undef HEED_OPS_GATED_MESA_CHUNK_INL_H_
#else
#define HEED_OPS_GATED_MESA_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "heed/core/carver.h"
#include "heed/ops/gated/mesa/mesa_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::mesa::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// A chunk of n tokens costs 2 K + n multiplications per channel and step of the solver and reads S once. With 16, S is
// read from L1 often enough to be hidden behind the multiplications.
constexpr int64_t kTokens = kChunkTokens;

// Calls f(T(), S()) for the types of the computation and of q, k and v.
template <class F>
HWY_INLINE void WithTypes(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double(), double());
  hs::WithStorage<float>(dtype, [&](auto stored) HWY_ATTR { f(float(), stored); });
}

// The buffers of a thread. Rows of K or V channels are padded to Kp and Vp, with zeros, and rows of both to W = Kp +
// Vp. A T at the end of a name: transposed, with rows of 16 tokens.
template <class T>
struct Chunk {
  int64_t K, V, Kp, Vp, W, bytes;
  T *q, *kv, *kvT, *lamb;            // k and v side by side
  T *x, *r, *p, *Ap, *decayed;       // of the solver; decayed: rows times a_t
  T *o, *pairs, *between, *weights;  // [16, 16]: D_ts, and D_ts beta_s
  T *since, *gate, *beta, *step;     // [16]: a_t, ..., a step's factors
  T *rr, *least, *scale, *eps;       // [16]: <r, r> and its value at convergence, factors of a right-hand side
  T* state;                          // [K, W]
  T* H;                              // [K, Kp]: a copy of H_kk, whose rows use every set of the L1 cache
  // For gradients.
  T *d_o, *d_oT, *y, *dx, *Hx, *e, *zn, *scaled, *outT, *dstate, *dk, *dv, *states;
  double* of_decays;

  static int64_t Padded(int64_t size) { return (size + 15) / 16 * 16; }

  // `num_states`: states that the backward pass keeps. With a null base only `bytes` is set.
  Chunk(const Call& call, void* base, bool backward, int64_t num_states)
      : K(call.K), V(call.V), Kp(Padded(K)), Vp(Padded(V)), W(Kp + Vp) {
    Carver carver(base);
    for (T** rows : {&q, &x, &r, &p, &Ap, &decayed}) carver.Next(*rows, kTokens * Kp);
    for (T** rows : {&kv, &kvT}) carver.Next(*rows, kTokens * W);
    carver.Next(o, kTokens * Vp);
    carver.Next(lamb, Kp);
    for (T** square : {&pairs, &between, &weights}) carver.Next(*square, kTokens * kTokens);
    for (T** row : {&since, &gate, &beta, &step, &rr, &least, &scale, &eps}) carver.Next(*row, kTokens);
    carver.Next(state, K * W);
    carver.Next(H, K * Kp);
    if (backward) {
      for (T** rows : {&y, &dx, &Hx, &e, &dk}) carver.Next(*rows, kTokens * Kp);
      for (T** rows : {&d_o, &d_oT, &dv}) carver.Next(*rows, kTokens * Vp);
      for (T** rows : {&zn, &scaled, &outT}) carver.Next(*rows, kTokens * W);
      carver.Next(dstate, K * W);
      carver.Next(states, num_states * K * W);
      carver.Next(of_decays, kTokens);
    }
    bytes = carver.bytes();
  }
};

template <class T>
HWY_INLINE void Clear(T* to, int64_t n) {
  std::memset(to, 0, static_cast<size_t>(n) * sizeof(T));
}

// sum_i a[i] b[i] of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE T Product(D d, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, int64_t n) {
  constexpr int64_t N = hn::MaxLanes(D());
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < n; i += N) sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  return hn::ReduceSum(d, sum);
}

// to = factor from, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void Scale(D d, T factor, const T* from, int64_t n, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factors = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += N) hn::Store(hn::Mul(factors, hn::Load(d, from + i)), d, to + i);
}

template <class T>
HWY_INLINE const T* At(const ConstTensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}
template <class T>
HWY_INLINE T* At(const TensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}

template <class T>
HWY_INLINE void CopyRow(const T* from, int64_t from_step, int64_t n, T* to, int64_t to_step) {
  if (from_step == 1 && to_step == 1) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i * to_step] = from[i * from_step];
}

// A state of the caller, H_kk and H_kv side by side, and rows of W. An absent state is zeros.
template <class T>
HWY_NOINLINE void LoadState(const ConstTensorView& t, const Chunk<T>& c, int64_t n, int64_t h, T* to) {
  Clear(to, c.K * c.W);
  for (int64_t i = 0; i < c.K && t.present(); ++i) {
    const T* row = At<T>(t, n, h, 0) + i * t.stride(2);
    CopyRow(row, t.stride(3), c.K, to + i * c.W, 1);
    CopyRow(row + c.K * t.stride(3), t.stride(3), c.V, to + i * c.W + c.Kp, 1);
  }
}
template <class T>
HWY_NOINLINE void StoreState(const TensorView& t, const Chunk<T>& c, int64_t n, int64_t h, const T* from) {
  for (int64_t i = 0; i < c.K && t.present(); ++i) {
    T* row = At<T>(t, n, h, 0) + i * t.stride(2);
    CopyRow(from + i * c.W, 1, c.K, row, t.stride(3));
    CopyRow(from + i * c.W + c.Kp, 1, c.V, row + c.K * t.stride(3), t.stride(3));
  }
}

template <class T>
HWY_NOINLINE void LoadLambda(const Inputs& in, int64_t h, Chunk<T>& c) {
  Clear(c.lamb, c.Kp);
  for (int64_t i = 0; i < c.K; ++i) {
    c.lamb[i] =
        static_cast<T>(LoadAsDouble(in.lamb.dtype(), in.lamb.data(), h * in.lamb.stride(0) + i * in.lamb.stride(1)));
  }
}

// Loads `count` tokens from `token` on. A gate above 1 counts as 1.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadChunk(D d, const Inputs& in, int64_t b, int64_t token, int64_t count, int64_t h, Chunk<T>& c) {
  const auto number = [&](const ConstTensorView& t, int64_t i) {
    return LoadAsDouble(t.dtype(), t.data(), b * t.stride(0) + (token + i) * t.stride(1) + h * t.stride(2));
  };
  for (int64_t i = 0; i < count; ++i) {
    hs::LoadRow(d, At<S>(in.q, b, token + i, h), c.K, c.Kp, c.q + i * c.Kp);
    hs::LoadRow(d, At<S>(in.k, b, token + i, h), c.K, c.Kp, c.kv + i * c.W);
    hs::LoadRow(d, At<S>(in.v, b, token + i, h), c.V, c.Vp, c.kv + i * c.W + c.Kp);
    c.beta[i] = static_cast<T>(number(in.beta, i));
    T gate = 1;
    if (in.log_decay.present()) {
      const double g = number(in.log_decay, i);
      gate = static_cast<T>(std::exp(g > 0 ? 0 : g));
    }
    c.gate[i] = gate;
    c.since[i] = i == 0 ? gate : c.since[i - 1] * gate;
    T *HWY_RESTRICT decays = c.between + i * kTokens, *HWY_RESTRICT weights = c.weights + i * kTokens;
    Clear(decays, kTokens);
    Clear(weights, kTokens);
    for (int64_t s = 0; s <= i; ++s) {
      decays[s] = s == i ? T{1} : decays[s - kTokens] * gate;
      weights[s] = decays[s] * c.beta[s];
    }
  }
  hs::TransposeRows(c.kv, c.W, count, c.W, c.kvT, kTokens);
}

// pairs[t][s] *= weights[t][s] for s <= t; -0 after.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void WeightPairs(D d, int64_t count, const T* HWY_RESTRICT weights, T* HWY_RESTRICT pairs) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto after = hn::Set(d, T{-0.0});
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t s = 0; s < kTokens; s += N) {
      T* HWY_RESTRICT at = pairs + t * kTokens + s;
      const auto seen = hn::FirstN(d, static_cast<size_t>(std::clamp<int64_t>(t + 1 - s, 0, N)));
      hn::Store(hn::IfThenElse(seen, hn::Mul(hn::Load(d, weights + t * kTokens + s), hn::Load(d, at)), after), d, at);
    }
  }
}

// out_t += A_t^T x_t, where A_t are columns of S_t: `state` has those of S, `rows` those of k and v side by side.
// `decayed` has the rows of x times a_t.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ReadState(D d, int64_t count, const T* x, const T* decayed, const T* state, int64_t state_row,
                            const T* rows, int64_t columns, Chunk<T>& c, T* out, int64_t out_row) {
  hs::MultiplyPairs(d, x, c.Kp, c.kvT, c.K, count, c.pairs, kTokens);
  WeightPairs(d, count, c.weights, c.pairs);
  hs::Multiply(d, decayed, c.Kp, 1, state, state_row, c.K, count, columns, out, out_row);
  hs::MultiplyLower(d, c.pairs, kTokens, rows, c.W, count, columns, out, out_row);
}

// Solves (H_kk,t + diag(lambda)) x_t = b_t for the tokens of a chunk. A right-hand side is scaled by a power of two, so
// that no square overflows or underflows. Steps of a token whose <r, r> is below u^2 2^-12 of the first are left out:
// they change no digit of x, and rounding errors may grow in them.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Solve(D d, const Call& call, int64_t count, const T* b, Chunk<T>& c, T* x) {
  constexpr int64_t N = hn::MaxLanes(D());
  const int64_t Kp = c.Kp;
  const auto quotient = [](T a, T of, T eps) { return of == 0 || a == 0 ? T{0} : a / (of + eps); };
  for (int64_t i = 0; i < c.K; ++i) std::copy(c.state + i * c.W, c.state + i * c.W + Kp, c.H + i * Kp);
  constexpr T kRoundoff = std::numeric_limits<T>::epsilon() / 2;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t at = t * Kp;
    auto most = hn::Zero(d);
    for (int64_t i = at; i < at + Kp; i += N) most = hn::Max(most, hn::Abs(hn::Load(d, b + i)));
    const T size = hn::ReduceMax(d, most);
    const bool ordinary = size >= std::numeric_limits<T>::min() && size <= std::numeric_limits<T>::max();
    c.scale[t] = ordinary ? std::ldexp(T{1}, -std::ilogb(size)) : T{1};
    c.eps[t] = static_cast<T>(call.eps) * c.scale[t] * c.scale[t];
    Scale(d, c.scale[t], b + at, Kp, c.r + at);
    std::copy(c.r + at, c.r + at + Kp, c.p + at);
    Clear(x + at, Kp);
    c.rr[t] = Product(d, c.r + at, c.r + at, Kp);
    c.least[t] = c.rr[t] * (kRoundoff * kRoundoff / 4096);
  }
  const auto converged = [&c](int64_t t) { return c.rr[t] <= c.least[t]; };
  for (int64_t n = 0; n < call.iterations; ++n) {
    int64_t active = 0;
    for (int64_t t = 0; t < count; ++t) active += converged(t) ? 0 : 1;
    if (active == 0) break;
    for (int64_t t = 0; t < count; ++t) {
      const auto since = hn::Set(d, c.since[t]);
      for (int64_t i = 0; i < Kp; i += N) {
        const auto p = hn::Load(d, c.p + t * Kp + i);
        hn::Store(hn::Mul(since, p), d, c.decayed + t * Kp + i);
        hn::Store(hn::Mul(hn::Load(d, c.lamb + i), p), d, c.Ap + t * Kp + i);
      }
    }
    ReadState(d, count, c.p, c.decayed, c.H, Kp, c.kv, c.K, c, c.Ap, Kp);
    for (int64_t t = 0; t < count; ++t) {
      c.step[t] = converged(t) ? T{0} : quotient(c.rr[t], Product(d, c.p + t * Kp, c.Ap + t * Kp, Kp), c.eps[t]);
    }
    for (int64_t t = 0; t < count; ++t) {
      const auto step = hn::Set(d, c.step[t]);
      auto rr = hn::Zero(d);
      for (int64_t i = t * Kp; i < (t + 1) * Kp; i += N) {
        hn::Store(hn::MulAdd(step, hn::Load(d, c.p + i), hn::Load(d, x + i)), d, x + i);
        const auto r = hn::NegMulAdd(step, hn::Load(d, c.Ap + i), hn::Load(d, c.r + i));
        hn::Store(r, d, c.r + i);
        rr = hn::MulAdd(r, r, rr);
      }
      const T next = hn::ReduceSum(d, rr);
      c.step[t] = quotient(next, c.rr[t], c.eps[t]);
      c.rr[t] = next;
    }
    for (int64_t t = 0; t < count; ++t) {
      const auto step = hn::Set(d, c.step[t]);
      for (int64_t i = t * Kp; i < (t + 1) * Kp; i += N) {
        hn::Store(hn::MulAdd(step, hn::Load(d, c.p + i), hn::Load(d, c.r + i)), d, c.p + i);
      }
    }
  }
  for (int64_t t = 0; t < count; ++t) Scale(d, 1 / c.scale[t], x + t * Kp, Kp, x + t * Kp);
}

// The state after the tokens of a chunk.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Advance(D d, int64_t count, Chunk<T>& c, T* state) {
  const T all = c.since[count - 1];
  if (all == 0) {
    Clear(state, c.K * c.W);
  } else if (all != 1) {
    Scale(d, all, state, c.K * c.W, state);
  }
  for (int64_t s = 0; s < count; ++s) {
    Scale(d, c.weights[(count - 1) * kTokens + s], c.kv + s * c.W, c.Kp, c.decayed + s * c.Kp);
  }
  hs::Multiply(d, c.decayed, 1, c.Kp, c.kv, c.W, count, c.K, c.W, state, c.W);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::mesa::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_GATED_MESA_CHUNK_INL_H_
