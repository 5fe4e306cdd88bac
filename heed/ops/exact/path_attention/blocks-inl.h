// Blocks of 64 tokens of PaTH attention: what is prepared once per key head, and the logits of a block of rows.
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
#include <cstring>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::path_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Calls f(T(), S()) for the types of the computation and of q, k, v and w.
template <class F>
HWY_INLINE void WithTypes(const Inputs& in, const F& f) {
  if (in.q.dtype() == DType::kF64) return f(double(), double());
  hs::WithStorage<float>(in.q.dtype(), [&](auto stored) HWY_ATTR { f(float(), stored); });
}

// Row lengths: D and Dv in whole vectors of any target.
struct Shape {
  explicit Shape(const Call& call)
      : D(call.D), Dv(call.Dv), Dp((call.D + 15) / 16 * 16), Vp((call.Dv + 15) / 16 * 16), G(call.group()) {}
  int64_t D, Dv, Dp, Vp, G;
};

// A block of one key head, as it is kept; a T at the end of a name: transposed. Query heads have log forget gates of
// their own.
template <class T>
struct Block {
  T *kT, *wT, *keysT;    // [D, 64]; keys: as they leave the block
  T *X, *Y, *P, *v;      // [64, 64], [64, Dp], [D, Dp], [64, Vp]
  T* until;              // [G, 64]: sums of log forget gates after a token, up to the block's end
  double* total;         // [G]: sums over the block
  T *k, *w, *keys, *vT;  // [64, Dp], and [Dv, 64]: from here on for gradients
  T *PT, *N;             // [D, Dp], [64, 64]
  // Sums of gradients: of keys that leave the block, values, P, and of what products within the block read.
  T *d_keys, *d_v, *d_P, *d_k, *d_w, *d_X, *d_Y;
  double *of_rows, *of_columns, *across;  // [G, 64], [G, 64], [G]: of log forget gates
  int64_t sums, bytes;                    // offset of the sums

  Block(const Shape& s, void* base, bool backward) {
    Carver carver(base);
    for (T** rows : {&kT, &wT, &keysT}) carver.Next(*rows, s.D * kBlock);
    carver.Next(X, kBlock * kBlock);
    carver.Next(Y, kBlock * s.Dp);
    carver.Next(P, s.D * s.Dp);
    carver.Next(v, kBlock * s.Vp);
    carver.Next(until, s.G * kBlock);
    carver.Next(total, s.G);
    sums = carver.bytes();
    if (backward) {
      for (T** rows : {&k, &w, &keys}) carver.Next(*rows, kBlock * s.Dp);
      carver.Next(vT, s.Dv * kBlock);
      carver.Next(PT, s.D * s.Dp);
      carver.Next(N, kBlock * kBlock);
      sums = carver.bytes();
      for (T** rows : {&d_keys, &d_k, &d_w, &d_Y}) carver.Next(*rows, kBlock * s.Dp);
      carver.Next(d_v, kBlock * s.Vp);
      carver.Next(d_P, s.D * s.Dp);
      carver.Next(d_X, kBlock * kBlock);
      for (double** gates : {&of_rows, &of_columns}) carver.Next(*gates, s.G * kBlock);
      carver.Next(across, s.G);
    }
    bytes = carver.bytes();
  }
};

// One key head of one sequence, whose blocks are kept from the index `first` on.
struct Unit {
  mechanism::TokenRange tokens;
  int64_t key_head, first, blocks;
  int64_t count(int64_t block) const { return std::min(kBlock, tokens.end - tokens.begin - block * kBlock); }
};

// Units whose blocks are kept at the same time: at most 64 MiB, or one unit.
inline std::vector<std::vector<Unit>> Waves(const Call& call, int64_t block_bytes) {
  std::vector<std::vector<Unit>> waves;
  int64_t kept = 0;
  for (const mechanism::TokenRange& s : call.sequences) {
    const int64_t blocks = (s.end - s.begin + kBlock - 1) / kBlock;
    for (int64_t h = 0; h < call.Hkv && blocks > 0; ++h) {
      if (waves.empty() || (kept + blocks) * block_bytes > (int64_t{64} << 20)) {
        waves.emplace_back();
        kept = 0;
      }
      waves.back().push_back({s, h, kept, blocks});
      kept += blocks;
    }
  }
  return waves;
}
inline int64_t NumBlocks(const std::vector<Unit>& wave) {
  return wave.empty() ? 0 : wave.back().first + wave.back().blocks;
}

// A block of rows of one query head, or with head 0, of a key head.
struct Task {
  const Unit* unit;
  int64_t head, block;  // head: within its group
};

template <class T>
HWY_INLINE void Clear(T* to, int64_t n) {
  std::memset(to, 0, static_cast<size_t>(n) * sizeof(T));
}

template <class T>
HWY_INLINE const T* At(const ConstTensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}
template <class T>
HWY_INLINE T* At(const TensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}
inline double Number(const ConstTensorView& t, int64_t i, int64_t j, int64_t h) {
  return LoadAsDouble(t.dtype(), t.data(), i * t.stride(0) + j * t.stride(1) + h * t.stride(2));
}
inline void SetNumber(const TensorView& t, int64_t i, int64_t j, int64_t h, double value) {
  if (!t.present()) return;
  StoreDouble(t.dtype(), t.data(), i * t.stride(0) + j * t.stride(1) + h * t.stride(2), value);
}

// Rows of a block, with zeros after the last of `count`.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadRows(D d, const ConstTensorView& t, int64_t b, int64_t token, int64_t count, int64_t h,
                           int64_t padded, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    hs::LoadRow(d, At<S>(t, b, token + i, h), t.size(3), padded, to + i * padded);
  }
  Clear(to + count * padded, (kBlock - count) * padded);
}
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreRows(D d, const T* from, int64_t padded, const TensorView& t, int64_t b, int64_t token,
                            int64_t count, int64_t h) {
  for (int64_t i = 0; i < count && t.present(); ++i) {
    hs::StoreRow(d, from + i * padded, t.size(3), At<S>(t, b, token + i, h));
  }
}

// Sets what is above the diagonal of [count, 64], or on it too with `strict`, to -0, which products skip.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void KeepLower(D d, int64_t count, bool strict, T* square) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto skipped = hn::Set(d, T{-0.0});
  for (int64_t t = 0; t < count; ++t) {
    const int64_t kept = strict ? t : t + 1;
    for (int64_t s = kept / N * N; s < kBlock; s += N) {
      T* HWY_RESTRICT at = square + t * kBlock + s;
      const auto seen = hn::FirstN(d, static_cast<size_t>(std::clamp<int64_t>(kept - s, 0, N)));
      hn::Store(hn::IfThenElse(seen, hn::Load(d, at), skipped), d, at);
    }
  }
}

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

// Prepares a block. The last one of a sequence is left by no key and passed by no query.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Prepare(D d, const Shape& s, const Inputs& in, const Task& task, bool backward, PrepareScratch<T> c,
                          const Block<T>& block) {
  const Unit& u = *task.unit;
  const int64_t n = u.count(task.block), token = u.tokens.begin + task.block * kBlock, b = u.tokens.batch;
  if (backward) {
    c.k = block.k;
    c.w = block.w;
    c.keys = block.keys;
    c.N = block.N;
  }
  LoadRows<S>(d, in.k, b, token, n, u.key_head, s.Dp, c.k);
  LoadRows<S>(d, in.w, b, token, n, u.key_head, s.Dp, c.w);
  LoadRows<S>(d, in.v, b, token, n, u.key_head, s.Vp, block.v);
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
    hs::TransposeRows(block.v, s.Vp, n, s.Dv, block.vT, kBlock);
    for (int64_t i = 0; i < s.D; ++i) {
      for (int64_t j = 0; j < s.Dp; ++j) block.PT[i * s.Dp + j] = j < s.D ? block.P[j * s.Dp + i] : T{0};
    }
  }
  for (int64_t h = 0; h < s.G && in.log_forget.present(); ++h) {
    double sum = 0;
    for (int64_t t = n; t-- > 0;) {
      block.until[h * kBlock + t] = static_cast<T>(sum);
      sum += Number(in.log_forget, b, token + t, u.key_head * s.G + h);
    }
    block.total[h] = sum;
  }
}

// A block of rows of a head on its way over the blocks of keys.
template <class T>
struct Rows {
  T *q, *next;     // [64, Dp]: as they enter the current block from the right, and the next one
  T *R, *S;        // [64, 64]: q W^T, and logits or probabilities
  T* gates;        // [64]: log forget gates of the rows
  double* before;  // [64]: sums of log forget gates from the beginning of the rows' block
  double passed;   // and of the blocks that were passed

  void LayOut(const Shape& s, Carver& carver) {
    for (T** rows : {&q, &next}) carver.Next(*rows, kBlock * s.Dp);
    for (T** square : {&R, &S}) carver.Next(*square, kBlock * kBlock);
    carver.Next(gates, kBlock);
    carver.Next(before, kBlock);
  }

  template <class S_, class D>
  HWY_NOINLINE void Load(D d, const Shape& s, const Inputs& in, const Task& task) {
    const Unit& u = *task.unit;
    const int64_t h = u.key_head * s.G + task.head, n = u.count(task.block),
                  token = u.tokens.begin + task.block * kBlock;
    LoadRows<S_>(d, in.q, u.tokens.batch, token, n, h, s.Dp, q);
    passed = 0;
    double sum = 0;
    for (int64_t i = 0; i < n && in.log_forget.present(); ++i) {
      const double gate = Number(in.log_forget, u.tokens.batch, token + i, h);
      sum += gate;
      gates[i] = static_cast<T>(gate);
      before[i] = sum;
    }
  }

  // Logits within the rows' own block; those of later keys are undefined. `gated`: with log forget gates.
  template <class D>
  HWY_NOINLINE void OwnLogits(D d, const Shape& s, const Block<T>& block, int64_t n, T scale, bool gated) {
    constexpr int64_t N = hn::MaxLanes(D());
    hs::MultiplyPairs(d, q, s.Dp, block.wT, s.D, n, R, kBlock);
    KeepLower(d, n, false, R);
    hs::MultiplyPairs(d, q, s.Dp, block.kT, s.D, n, S, kBlock);
    hs::MultiplyLower(d, R, kBlock, block.X, kBlock, n, kBlock, S, kBlock);
    const auto factor = hn::Set(d, scale);
    HWY_ALIGN T forgotten[kBlock] = {};
    for (int64_t i = 0; i < n; ++i) {
      T* HWY_RESTRICT row = S + i * kBlock;
      if (gated) {
        for (int64_t j = 0; j < i; ++j) forgotten[j] += gates[i];
        for (int64_t j = 0; j < kBlock; j += N) {
          hn::Store(hn::MulAdd(factor, hn::Load(d, row + j), hn::Load(d, forgotten + j)), d, row + j);
        }
      } else {
        for (int64_t j = 0; j < kBlock; j += N) hn::Store(hn::Mul(factor, hn::Load(d, row + j)), d, row + j);
      }
    }
  }

  // The rows leave their own block.
  template <class D>
  HWY_INLINE void Enter(D d, const Shape& s, const Block<T>& block, int64_t n) {
    hs::MultiplyLower(d, R, kBlock, block.Y, s.Dp, n, s.D, q, s.Dp);
  }

  // Logits of an earlier block.
  template <class D>
  HWY_NOINLINE void Logits(D d, const Shape& s, const Block<T>& block, int64_t head, int64_t n, T scale, bool gated) {
    constexpr int64_t N = hn::MaxLanes(D());
    Clear(S, n * kBlock);
    hs::Multiply(d, q, s.Dp, 1, block.keysT, kBlock, s.D, n, kBlock, S, kBlock);
    const auto factor = hn::Set(d, scale);
    const T* HWY_RESTRICT until = block.until + head * kBlock;
    for (int64_t i = 0; i < n; ++i) {
      T* HWY_RESTRICT row = S + i * kBlock;
      if (gated) {
        const auto of_row = hn::Set(d, static_cast<T>(before[i] + passed));
        for (int64_t j = 0; j < kBlock; j += N) {
          const auto forgotten = hn::Add(of_row, hn::Load(d, until + j));
          hn::Store(hn::MulAdd(factor, hn::Load(d, row + j), forgotten), d, row + j);
        }
      } else {
        for (int64_t j = 0; j < kBlock; j += N) hn::Store(hn::Mul(factor, hn::Load(d, row + j)), d, row + j);
      }
    }
    if (gated) passed += block.total[head];
  }

  // The rows pass an earlier block, to `to`.
  template <class D>
  HWY_INLINE void Pass(D d, const Shape& s, const Block<T>& block, int64_t n, const T* from, T* to) {
    Clear(to, n * s.Dp);
    hs::Multiply(d, from, s.Dp, 1, block.P, s.Dp, s.D, n, s.D, to, s.Dp);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::path_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_PATH_ATTENTION_BLOCKS_INL_H_
