// A chunk of tokens of TTT-Linear: what the queries read, and the state after it.
//
// Compiled once per SIMD target. With the state W and G before a chunk, whose rows are those of W and b, keys and
// queries ending in 1, P_ts = <q_t, k_s>, and the gradients g at W (common/test_time_training-inl.h):
//
//   y_t = q_t W - eta_t (q_t G + sum_{s <= t} lr_s P_ts g_s)
//
// so that no W_t is ever made. A chunk adds sum_s lr_s k_s g_s^T to G, and one that ends a mini-batch -eta G to W.
#if defined(HEED_OPS_DELTA_TTT_LINEAR_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_DELTA_TTT_LINEAR_CHUNK_INL_H_
#undef HEED_OPS_DELTA_TTT_LINEAR_CHUNK_INL_H_
#else
#define HEED_OPS_DELTA_TTT_LINEAR_CHUNK_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/ops/delta/common/test_time_training-inl.h"
#include "heed/ops/delta/ttt_linear/ttt_linear_internal.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::ttt_linear::HWY_NAMESPACE {
using namespace test_time_training::HWY_NAMESPACE;  // NOLINT: what both mechanisms do

// With a null base only `bytes` is set.
template <class T>
struct Buffers : Chunk<T> {
  int64_t bytes;
  T* eta;             // [16]
  T *W, *G;           // the parts of the state
  T *dW, *dG, *read;  // read: what eta is a factor of

  Buffers(const Call& call, void* base, bool backward, int64_t kept_states, int64_t tokens)
      : Chunk<T>(call, call.K + 1, 2, DividesMiniBatches(call) ? 2 : 1) {
    Carver carver(base);
    this->Carve(carver, backward, kept_states, tokens);
    carver.Next(eta, kTokens);
    W = this->trained = this->parts[0];
    G = this->parts[1];
    if (backward) {
      carver.Next(read, kTokens * this->Vp);
      dW = this->d_trained = this->d_parts[0];
      dG = this->d_parts[1];
    }
    bytes = carver.bytes();
  }
};

// The state before the first token of a sequence, and the norm of a head.
template <class T>
HWY_NOINLINE void Begin(const Call& call, const Inputs& in, int64_t n, int64_t h, Buffers<T>& c) {
  LoadPart(in.initial_state, c, n, h, 0, c.W);
  LoadPart(call.offsets[static_cast<size_t>(n)] > 0 ? in.initial_state : ConstTensorView(), c, n, h, 1, c.G);
  LoadNorm(in.weight, in.bias, h, c);
}

// Loads the chunk of a sequence from `token` on, whose place in its mini-batch is `offset`.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadChunk(D d, const Call& call, const Inputs& in, int64_t b, int64_t token, int64_t offset,
                            int64_t left, int64_t h, Buffers<T>& c) {
  LoadRows<S>(d, call, in, b, token, offset, left, h, c);
  for (int64_t i = 0; i < c.count; ++i) {
    c.eta[i] = NumberAt<T>(in.eta, b, token + i, h);
    c.lr[i] = in.lr.present() ? NumberAt<T>(in.lr, b, token + i, h) : T{1};
  }
}

// `read`, the sum that eta is a factor of: q_t G + sum_{s <= t} lr_s P_ts g_s.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ReadSums(D d, Buffers<T>& c, T* read) {
  Clear(read, c.count * c.Vp);
  if (!c.begins) hs::Multiply(d, c.q, c.Kp, 1, c.G, c.Vp, c.rows, c.count, c.Vp, read, c.Vp);
  hs::MultiplyPairs(d, c.q, c.Kp, c.kT, c.rows, c.count, c.pairs, kTokens);
  WeightPairs(d, c.count, static_cast<const T*>(nullptr), T{1}, c.lr, c.pairs, c.weighted);
  hs::MultiplyLower(d, c.weighted, kTokens, c.g, c.Vp, c.count, c.Vp, read, c.Vp);
}

// y = q W - eta read, and its LN.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ReadQueries(D d, const Call& call, const T* read, Buffers<T>& c) {
  ReadRows(d, c, c.q, c.W, c.y);
  for (int64_t t = 0; t < c.count; ++t) {
    AddScaled(d, -c.eta[t], read + t * c.Vp, c.Vp, c.y + t * c.Vp);
    c.yr[t] = Normalise(d, c.y + t * c.Vp, c.K, c.Vp, call.eps, c.yx + t * c.Vp);
  }
}

// The state after the tokens of a chunk. W is rounded once per mini-batch, not once per token.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Advance(D d, Buffers<T>& c) {
  for (int64_t s = 0; s < c.count; ++s) Scale(d, c.lr[s], c.k + s * c.Kp, c.Kp, c.scaled + s * c.Kp);
  hs::Multiply(d, c.scaled, 1, c.Kp, c.g, c.Vp, c.count, c.rows, c.Vp, c.G, c.Vp);
  if (!c.ends) return;
  AddScaled(d, -c.eta[c.count - 1], c.G, c.size, c.W);
  Clear(c.G, c.size);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::ttt_linear::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_DELTA_TTT_LINEAR_CHUNK_INL_H_
