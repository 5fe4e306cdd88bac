// Blocks of 64 tokens of Wall attention: what is prepared once per head of decays, and the logits of a block of rows,
// as transitions-inl.h uses them.
//
// Compiled once per SIMD target. With a_t = exp(log_decay_t), elementwise, a key leaves its block as k_j E_j, where
// E_j = exp of the sum of the block's later log decays, and a query passes a block as q P, P = exp of the sum of all.
// Within its own block a query decays token by token on its way to the left: it meets key j, then passes a_j.
#if defined(HEED_OPS_EXACT_WALL_ATTENTION_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_EXACT_WALL_ATTENTION_BLOCKS_INL_H_
#undef HEED_OPS_EXACT_WALL_ATTENTION_BLOCKS_INL_H_
#else
#define HEED_OPS_EXACT_WALL_ATTENTION_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "heed/core/carver.h"
#include "heed/ops/exact/common/transitions-inl.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::wall_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;         // simd/
namespace ht = transitions::HWY_NAMESPACE;  // transitions-inl.h

using ht::Clear;
using ht::Shape;
using ht::Task;
using ht::Unit;

// A block of one head of decays, as it is kept.
template <class T>
struct Block : ht::BlockRows<T> {
  T *k, *a, *P;            // [64, Dp], [64, Dp], [Dp]
  T* E;                    // [64, Dp]: for gradients
  T *d_k, *d_decay, *d_P;  // sums of gradients: within the block, and of P

  Block(const Shape& s, void* base, bool backward) {
    Carver carver(base);
    this->Keep(s, carver);
    for (T** rows : {&k, &a}) carver.Next(*rows, kBlock * s.Dp);
    carver.Next(P, s.Dp);
    if (backward) {
      this->KeepForGradients(s, carver);
      carver.Next(E, kBlock * s.Dp);
    }
    this->sums = carver.bytes();
    if (backward) {
      this->Sum(s, carver);
      for (T** rows : {&d_k, &d_decay}) carver.Next(*rows, kBlock * s.Dp);
      carver.Next(d_P, s.Dp);
    }
    this->bytes = carver.bytes();
  }
};

// Work of a thread: rows of a block, and the sum of its log decays.
template <class T>
struct PrepareScratch {
  T *keys, *E, *sum;
  int64_t bytes;

  PrepareScratch(const Shape& s, void* base) {
    Carver carver(base);
    for (T** rows : {&keys, &E}) carver.Next(*rows, kBlock * s.Dp);
    carver.Next(sum, s.Dp);
    bytes = carver.bytes();
  }
};

// out = a b, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void MultiplyRow(D d, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, int64_t n, T* out) {
  for (int64_t c = 0; c < n; c += static_cast<int64_t>(hn::MaxLanes(D()))) {
    hn::Store(hn::Mul(hn::Load(d, a + c), hn::Load(d, b + c)), d, out + c);
  }
}

// A block of rows of a head on its way over the blocks of keys.
template <class T>
struct Rows : ht::RowsBase<T> {
  using ht::RowsBase<T>::q, ht::RowsBase<T>::next, ht::RowsBase<T>::S;

  // Products of q within the rows' own block, and the rows as they leave it, in `next`. Four rows at a time meet a key,
  // since each waits for its previous product.
  template <class D>
  HWY_NOINLINE void OwnLogits(D d, const Shape& s, const Block<T>& block, int64_t n) {
    constexpr int64_t N = hn::MaxLanes(D()), kRows = 4;
    Clear(S, n * kBlock);
    std::copy(q, q + n * s.Dp, next);
    for (int64_t first = 0; first < n; first += kRows) {
      const int64_t end = std::min(first + kRows, n);
      for (int64_t j = end; j-- > 0;) {
        const T *HWY_RESTRICT k = block.k + j * s.Dp, *HWY_RESTRICT a = block.a + j * s.Dp;
        for (int64_t i = std::max(first, j); i < end; ++i) {
          T* HWY_RESTRICT x = next + i * s.Dp;
          auto sum = hn::Zero(d);
          for (int64_t c = 0; c < s.Dp; c += N) {
            const auto channels = hn::Load(d, x + c);
            sum = hn::MulAdd(channels, hn::Load(d, k + c), sum);
            hn::Store(hn::Mul(channels, hn::Load(d, a + c)), d, x + c);
          }
          S[i * kBlock + j] = hn::ReduceSum(d, sum);
        }
      }
    }
  }

  // The rows leave their own block.
  template <class D>
  HWY_INLINE void Enter(D, const Shape&, const Block<T>&, int64_t) {
    std::swap(q, next);
  }

  // The rows pass an earlier block, to `to`.
  template <class D>
  HWY_INLINE void Pass(D d, const Shape& s, const Block<T>& block, int64_t n, const T* from, T* to) {
    for (int64_t i = 0; i < n * s.Dp; i += s.Dp) MultiplyRow(d, from + i, block.P, s.Dp, to + i);
  }

  // Adds what the rows' gradient `from`, as they left the block, is as they enter it.
  template <class D>
  HWY_INLINE void PassGradient(D d, const Shape& s, const Block<T>& block, int64_t n, const T* from, T* to) {
    AddProducts(d, from, block.P, 0, s.Dp, n, to, s.Dp);
  }

  // Adds the gradient of P: the rows entered the block as `queries` and left it with the gradient `dq`.
  template <class D>
  HWY_INLINE void AddPassed(D d, const Shape& s, const Block<T>& block, int64_t n, const T* queries, const T* dq) {
    AddProducts(d, queries, dq, s.Dp, s.Dp, n, block.d_P, 0);
  }

 private:
  // out += a b, elementwise over n rows of a and of b and out as their steps say; a step of 0 is one row.
  template <class D>
  static HWY_INLINE void AddProducts(D d, const T* a, const T* b, int64_t b_step, int64_t padded, int64_t n, T* out,
                                     int64_t out_step) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < padded; c += static_cast<int64_t>(hn::MaxLanes(D()))) {
        T* const to = out + i * out_step + c;
        hn::Store(hn::MulAdd(hn::Load(d, a + i * padded + c), hn::Load(d, b + i * b_step + c), hn::Load(d, to)), d, to);
      }
    }
  }
};

// Wall attention for transitions-inl.h.
struct Wall {
  using Inputs = wall_attention::Inputs;
  using Outputs = wall_attention::Outputs;
  template <class T>
  using Block = wall_attention::HWY_NAMESPACE::Block<T>;
  template <class T>
  using Rows = wall_attention::HWY_NAMESPACE::Rows<T>;
  template <class T>
  using PrepareScratch = wall_attention::HWY_NAMESPACE::PrepareScratch<T>;

  // Prepares a block. The last one of a sequence is left by no key and passed by no query.
  template <class S, class D, class T = hn::TFromD<D>>
  static HWY_NOINLINE void Prepare(D d, const Shape& s, const Inputs& in, const Task& task, bool backward,
                                   PrepareScratch<T> c, const Block<T>& block) {
    constexpr int64_t N = hn::MaxLanes(D());
    const Unit& u = *task.unit;
    const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch;
    if (backward) {
      c.keys = block.keys;
      c.E = block.E;
    }
    ht::LoadRows<S>(d, in.k, b, token, n, u.key_head, s.Dp, block.k);
    in.log_decay.dtype() == in.q.dtype() ? ht::LoadRows<S>(d, in.log_decay, b, token, n, u.head, s.Dp, block.a)
                                         : ht::LoadRows<T>(d, in.log_decay, b, token, n, u.head, s.Dp, block.a);
    Clear(c.sum, s.Dp);
    for (int64_t t = n; t-- > 0;) {
      T *HWY_RESTRICT a = block.a + t * s.Dp, *HWY_RESTRICT E = c.E + t * s.Dp;
      for (int64_t i = 0; i < s.Dp; i += N) {
        const auto sum = hn::Load(d, c.sum + i), log_decay = hn::Load(d, a + i);
        hn::Store(hs::Exp(d, sum), d, E + i);
        hn::Store(hn::Add(sum, log_decay), d, c.sum + i);
        hn::Store(hs::Exp(d, log_decay), d, a + i);
      }
    }
    if (task.block + 1 == u.blocks) return;
    for (int64_t i = 0; i < s.Dp; i += N) hn::Store(hs::Exp(d, hn::Load(d, c.sum + i)), d, block.P + i);
    MultiplyRow(d, block.k, c.E, kBlock * s.Dp, c.keys);
    hs::TransposeRows(c.keys, s.Dp, n, s.D, block.keysT, kBlock);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::wall_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_WALL_ATTENTION_BLOCKS_INL_H_
