// Blocks of 64 tokens of PaTH attention: what is prepared once per key head, and the logits of a block of rows, as
// transitions-inl.h uses them.
//
// Compiled once per SIMD target. With rows w_t of W and a block's A = I + tril(diag(beta) W W^T, -1), its tokens
// transform x into x + W^T Y x (the UT transform), where
//
//   N = -A^-1 diag(beta),  Y = N W,  X = N tril(W K^T, -1),  P = H_n ... H_1 = I + W^T Y
//
// A key j as it leaves its block is row j of K + X^T W. A query i as it enters its own block from the right is row i of
// Q + tril(Q W^T) Y; its logits within the block are rows of tril(Q K^T) + tril(Q W^T) X. It passes through an earlier
// block as Q P. Signs are chosen so that products only add.
#if defined(HEED_OPS_EXACT_PATH_ATTENTION_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_EXACT_PATH_ATTENTION_BLOCKS_INL_H_
#undef HEED_OPS_EXACT_PATH_ATTENTION_BLOCKS_INL_H_
#else
#define HEED_OPS_EXACT_PATH_ATTENTION_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/core/carver.h"
#include "heed/ops/exact/common/transitions-inl.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::path_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;         // simd/
namespace ht = transitions::HWY_NAMESPACE;  // transitions-inl.h

using ht::Clear;
using ht::KeepLower;
using ht::Number;
using ht::Shape;
using ht::Task;
using ht::Unit;

// A block of one key head, as it is kept; a T at the end of a name: transposed.
template <class T>
struct Block : ht::BlockRows<T> {
  T *kT, *wT;    // [D, 64]
  T *X, *Y, *P;  // [64, 64], [64, Dp], [D, Dp]
  T *k, *w;      // [64, Dp]: from here on for gradients
  T *PT, *N;     // [D, Dp], [64, 64]
  // Sums of gradients: of P, and of what products within the block read.
  T *d_P, *d_k, *d_w, *d_X, *d_Y;

  Block(const Shape& s, void* base, bool backward) {
    Carver carver(base);
    this->Keep(s, carver);
    for (T** rows : {&kT, &wT}) carver.Next(*rows, s.D * kBlock);
    carver.Next(X, kBlock * kBlock);
    carver.Next(Y, kBlock * s.Dp);
    carver.Next(P, s.D * s.Dp);
    if (backward) {
      this->KeepForGradients(s, carver);
      for (T** rows : {&k, &w}) carver.Next(*rows, kBlock * s.Dp);
      carver.Next(PT, s.D * s.Dp);
      carver.Next(N, kBlock * kBlock);
    }
    this->sums = carver.bytes();
    if (backward) {
      this->Sum(s, carver);
      for (T** rows : {&d_k, &d_w, &d_Y}) carver.Next(*rows, kBlock * s.Dp);
      carver.Next(d_P, s.D * s.Dp);
      carver.Next(d_X, kBlock * kBlock);
    }
    this->bytes = carver.bytes();
  }
};

// N = -A^-1 diag(beta), by substitution from the first row on. G = W W^T.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void SolveTransform(D d, int64_t count, const T* G, const T* beta, T* N) {
  constexpr int64_t L = hn::MaxLanes(D());
  constexpr int64_t kVectors = kBlock / L;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t vectors = t / L + 1;  // beyond, rows are 0
    hn::Vec<D> sums[kVectors];
    for (int64_t c = 0; c < vectors; ++c) sums[c] = hn::Zero(d);
    for (int64_t s = 0; s < t; ++s) {
      const auto factor = hn::Set(d, G[t * kBlock + s]);
      for (int64_t c = 0; c < s / L + 1; ++c) {
        sums[c] = hn::MulAdd(factor, hn::Load(d, N + s * kBlock + c * L), sums[c]);
      }
    }
    const auto factor = hn::Set(d, -beta[t]);
    for (int64_t c = 0; c < kVectors; ++c) {
      hn::Store(c < vectors ? hn::Mul(factor, sums[c]) : hn::Zero(d), d, N + t * kBlock + c * L);
    }
    N[t * kBlock + t] = -beta[t];
  }
  KeepLower(d, count, false, N);
}

// Work of a thread: two squares and rows of a block.
template <class T>
struct PrepareScratch {
  T *k, *w, *keys, *G, *B, *N, *beta;
  int64_t bytes;

  PrepareScratch(const Shape& s, void* base) {
    Carver carver(base);
    for (T** rows : {&k, &w, &keys}) carver.Next(*rows, kBlock * s.Dp);
    for (T** square : {&G, &B, &N}) carver.Next(*square, kBlock * kBlock);
    carver.Next(beta, kBlock);
    bytes = carver.bytes();
  }
};

template <class T>
HWY_INLINE void LoadBeta(const Inputs& in, const Unit& u, int64_t token, int64_t count, T* beta) {
  for (int64_t t = 0; t < count; ++t) {
    beta[t] = static_cast<T>(Number(in.beta, u.tokens.batch, token + t, u.key_head));
  }
}

// A block of rows of a head on its way over the blocks of keys.
template <class T>
struct Rows : ht::RowsBase<T> {
  using ht::RowsBase<T>::q, ht::RowsBase<T>::S;
  T* R;  // [64, 64]: q W^T

  void LayOut(const Shape& s, Carver& carver) {
    ht::RowsBase<T>::LayOut(s, carver);
    carver.Next(R, kBlock * kBlock);
  }

  // Products of q within the rows' own block; those with later keys are undefined.
  template <class D>
  HWY_NOINLINE void OwnLogits(D d, const Shape& s, const Block<T>& block, int64_t n) {
    hs::MultiplyPairs(d, q, s.Dp, block.wT, s.D, n, R, kBlock);
    KeepLower(d, n, false, R);
    hs::MultiplyPairs(d, q, s.Dp, block.kT, s.D, n, S, kBlock);
    hs::MultiplyLower(d, R, kBlock, block.X, kBlock, n, kBlock, S, kBlock);
  }

  // The rows leave their own block.
  template <class D>
  HWY_INLINE void Enter(D d, const Shape& s, const Block<T>& block, int64_t n) {
    hs::MultiplyLower(d, R, kBlock, block.Y, s.Dp, n, s.D, q, s.Dp);
  }

  // The rows pass an earlier block, to `to`.
  template <class D>
  HWY_INLINE void Pass(D d, const Shape& s, const Block<T>& block, int64_t n, const T* from, T* to) {
    Clear(to, n * s.Dp);
    hs::Multiply(d, from, s.Dp, 1, block.P, s.Dp, s.D, n, s.D, to, s.Dp);
  }

  // Adds what the rows' gradient `from`, as they left the block, is as they enter it.
  template <class D>
  HWY_INLINE void PassGradient(D d, const Shape& s, const Block<T>& block, int64_t n, const T* from, T* to) {
    hs::Multiply(d, from, s.Dp, 1, block.PT, s.Dp, s.D, n, s.D, to, s.Dp);
  }

  // Adds the gradient of P: the rows entered the block as `queries` and left it with the gradient `dq`.
  template <class D>
  HWY_INLINE void AddPassed(D d, const Shape& s, const Block<T>& block, int64_t n, const T* queries, const T* dq) {
    hs::Multiply(d, queries, 1, s.Dp, dq, s.Dp, n, s.D, s.D, block.d_P, s.Dp);
  }
};

// PaTH attention for transitions-inl.h.
struct Path {
  using Inputs = path_attention::Inputs;
  using Outputs = path_attention::Outputs;
  template <class T>
  using Block = path_attention::HWY_NAMESPACE::Block<T>;
  template <class T>
  using Rows = path_attention::HWY_NAMESPACE::Rows<T>;
  template <class T>
  using PrepareScratch = path_attention::HWY_NAMESPACE::PrepareScratch<T>;

  // Prepares a block. The last one of a sequence is left by no key and passed by no query.
  template <class S, class D, class T = hn::TFromD<D>>
  static HWY_NOINLINE void Prepare(D d, const Shape& s, const Inputs& in, const Task& task, bool backward,
                                   PrepareScratch<T> c, const Block<T>& block) {
    const Unit& u = *task.unit;
    const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch;
    if (backward) {
      c.k = block.k;
      c.w = block.w;
      c.keys = block.keys;
      c.N = block.N;
    }
    ht::LoadRows<S>(d, in.k, b, token, n, u.key_head, s.Dp, c.k);
    ht::LoadRows<S>(d, in.w, b, token, n, u.key_head, s.Dp, c.w);
    LoadBeta(in, u, token, n, c.beta);
    hs::TransposeRows(c.k, s.Dp, n, s.D, block.kT, kBlock);
    hs::TransposeRows(c.w, s.Dp, n, s.D, block.wT, kBlock);
    hs::MultiplyPairs(d, c.w, s.Dp, block.wT, s.D, n, c.G, kBlock);
    SolveTransform(d, n, c.G, c.beta, c.N);
    hs::MultiplyPairs(d, c.w, s.Dp, block.kT, s.D, n, c.B, kBlock);
    KeepLower(d, n, true, c.B);
    Clear(block.X, kBlock * kBlock);
    hs::MultiplyLower(d, c.N, kBlock, c.B, kBlock, n, kBlock, block.X, kBlock);
    KeepLower(d, n, true, block.X);
    Clear(block.Y, kBlock * s.Dp);
    hs::MultiplyLower(d, c.N, kBlock, c.w, s.Dp, n, s.D, block.Y, s.Dp);
    if (task.block + 1 < u.blocks) {
      std::copy(c.k, c.k + kBlock * s.Dp, c.keys);
      hs::MultiplyUpper(d, block.X, kBlock, c.w, s.Dp, n, s.D, c.keys, s.Dp);
      hs::TransposeRows(c.keys, s.Dp, n, s.D, block.keysT, kBlock);
      Clear(block.P, s.D * s.Dp);
      for (int64_t i = 0; i < s.D; ++i) block.P[i * s.Dp + i] = 1;
      hs::Multiply(d, c.w, 1, s.Dp, block.Y, s.Dp, n, s.D, s.D, block.P, s.Dp);
    }
    if (backward) {
      for (int64_t i = 0; i < s.D; ++i) {
        for (int64_t j = 0; j < s.Dp; ++j) block.PT[i * s.Dp + j] = j < s.D ? block.P[j * s.Dp + i] : T{0};
      }
    }
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::path_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_PATH_ATTENTION_BLOCKS_INL_H_
