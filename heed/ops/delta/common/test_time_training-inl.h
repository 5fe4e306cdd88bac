// Chunks of tokens of a memory that is trained while it reads: their buffers, the gradients that train the memory, and
// the vector operations of both.
//
// Compiled once per SIMD target. A chunk has up to 16 tokens of one mini-batch. With the memory A before the mini-batch
//
//   z = k A,  g = LN'(z) (w .* e),  e = w .* LN(z) + c - (v - k)
//
// The mechanisms differ in what g does to the state, and in what queries read.
#if defined(HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INL_H_
#undef HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INL_H_
#else
#define HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "heed/core/carver.h"
#include "heed/ops/delta/common/test_time_training_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/products-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::test_time_training::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

constexpr int64_t kTokens = 16;  // of a chunk: the authors' mini-batch, and as many as register tiles of W need

// Calls f(T(), S()) for the types of the computation and of q, k and v.
template <class F>
HWY_INLINE void WithTypes(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double(), double());
  hs::WithStorage<float>(dtype, [&](auto stored) HWY_ATTR { f(float(), stored); });
}

// The tokens of the next chunk: none of another mini-batch, and none beyond a multiple of 16 of this one. `offset` is
// the place of the first in its mini-batch.
inline int64_t ChunkTokens(const Call& call, int64_t offset, int64_t left) {
  return std::min({left, call.mini_batch - offset, kTokens - offset % kTokens});
}

// Returns whether a chunk may begin inside a mini-batch.
inline bool DividesMiniBatches(const Call& call) {
  const auto inside = [](int64_t offset) { return offset > 0; };
  return call.mini_batch > kTokens || std::any_of(call.offsets.begin(), call.offsets.end(), inside);
}

// The buffers of a thread. Rows of V channels are padded to Vp, rows of keys and queries to Kp, both with zeros. A T at
// the end of a name: transposed, with rows of 16 tokens. A state has `num_parts` matrices.
template <class T>
struct Chunk {
  int64_t K, rows, Kp, Vp, size;      // a part of a state has `rows` rows, K or K + 1, and `size` elements
  int num_parts, kept_parts;          // kept_parts: the first ones, which a later chunk reads
  int64_t count = 0;                  // tokens
  bool begins = false, ends = false;  // a mini-batch
  T *q, *k, *kT;
  T *v, *z, *e, *x, *g, *y, *yx;  // y: what a query reads; yx: its LN
  T *w, *c;                       // [Vp]
  T *lr, *r, *yr;                 // [16]: factors of g; r and yr, 1 / sqrt(var + eps) of z and y
  T *pairs, *weighted;            // [16, 16]
  T* scaled;                      // [16, Kp]
  T* parts[3];                    // [rows, Vp]: of the state
  T* trained = nullptr;           // A, the part that gradients are taken at
  // For gradients.
  T *d_o, *dy, *dg, *dz, *dq, *dk, *de;
  T *gT, *dyT, *dzT, *outT;
  T *d_parts[3], *dw, *dc;
  T* d_trained = nullptr;
  T *kept, *all_z;

  static int64_t Padded(int64_t n) { return (n + 15) / 16 * 16; }

  Chunk(const Call& call, int64_t of_rows, int parts_of_state, int of_kept)
      : K(call.K), rows(of_rows), Kp(Padded(rows)), Vp(Padded(K)), size(rows * Vp), num_parts(parts_of_state),
        kept_parts(of_kept) {}

  // `kept_states`: states that the backward pass keeps, `tokens`: those of its longest sequence.
  void Carve(Carver& carver, bool backward, int64_t kept_states, int64_t tokens) {
    for (T** of_keys : {&q, &k, &scaled}) carver.Next(*of_keys, kTokens * Kp);
    carver.Next(kT, Kp * kTokens);
    for (T** of_values : {&v, &z, &e, &x, &g, &y, &yx}) carver.Next(*of_values, kTokens * Vp);
    for (T** row : {&w, &c}) carver.Next(*row, Vp);
    for (T** row : {&lr, &r, &yr}) carver.Next(*row, kTokens);
    for (T** square : {&pairs, &weighted}) carver.Next(*square, kTokens * kTokens);
    for (int part = 0; part < num_parts; ++part) carver.Next(parts[part], size);
    if (!backward) return;
    for (T** of_values : {&d_o, &dy, &dg, &dz, &de}) carver.Next(*of_values, kTokens * Vp);
    for (T** of_keys : {&dq, &dk}) carver.Next(*of_keys, kTokens * Kp);
    for (T** columns : {&gT, &dyT, &dzT}) carver.Next(*columns, Vp * kTokens);
    carver.Next(outT, Kp * kTokens);
    for (int part = 0; part < num_parts; ++part) carver.Next(d_parts[part], size);
    for (T** row : {&dw, &dc}) carver.Next(*row, Vp);
    carver.Next(kept, kept_states * kept_parts * size);
    carver.Next(all_z, tokens * Vp);
  }
};

template <class T>
HWY_INLINE void Clear(T* to, int64_t n) {
  std::memset(to, 0, static_cast<size_t>(n) * sizeof(T));
}
template <class T>
HWY_INLINE void Copy(const T* from, int64_t n, T* to) {
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
}

// sum_i a[i] b[i], to = factor from, and to += factor from, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE T Product(D d, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, int64_t n) {
  constexpr int64_t N = hn::MaxLanes(D());
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < n; i += N) sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  return hn::ReduceSum(d, sum);
}
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void Scale(D d, T factor, const T* from, int64_t n, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t i = 0; i < n; i += N) hn::Store(hn::Mul(hn::Set(d, factor), hn::Load(d, from + i)), d, to + i);
}
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void AddScaled(D d, T factor, const T* HWY_RESTRICT from, int64_t n, T* HWY_RESTRICT to) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factors = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += N) {
    hn::Store(hn::MulAdd(factors, hn::Load(d, from + i), hn::Load(d, to + i)), d, to + i);
  }
}

// The lanes of the vector at element i that belong to a row of n.
template <class D>
HWY_INLINE hn::Mask<D> Valid(D d, int64_t i, int64_t n) {
  constexpr int64_t N = hn::MaxLanes(D());
  return hn::FirstN(d, static_cast<size_t>(std::clamp<int64_t>(n - i, 0, N)));
}

// x = (z - mean(z)) r. Returns r = 1 / sqrt(var(z) + eps).
template <class D, class T = hn::TFromD<D>>
HWY_INLINE T Normalise(D d, const T* HWY_RESTRICT z, int64_t n, int64_t padded, double eps, T* HWY_RESTRICT x) {
  constexpr int64_t N = hn::MaxLanes(D());
  const T size = static_cast<T>(n);
  auto sum = hn::Zero(d), squares = hn::Zero(d);
  for (int64_t i = 0; i < padded; i += N) sum = hn::Add(sum, hn::Load(d, z + i));
  const auto mean = hn::Set(d, hn::ReduceSum(d, sum) / size);
  for (int64_t i = 0; i < padded; i += N) {
    const auto centred = hn::IfThenElseZero(Valid(d, i, n), hn::Sub(hn::Load(d, z + i), mean));
    hn::Store(centred, d, x + i);
    squares = hn::MulAdd(centred, centred, squares);
  }
  const T r = 1 / std::sqrt(hn::ReduceSum(d, squares) / size + static_cast<T>(eps));
  Scale(d, r, x, padded, x);
  return r;
}

// The gradient of LN, dz = r (dx - mean(dx) - x mean(x .* dx)), which is linear and symmetric, plus `rest` x. Returns
// mean(x .* dx). dz may be dx.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE T GradientOfNorm(D d, const T* HWY_RESTRICT x, T r, const T* dx, int64_t n, int64_t padded, T rest, T* dz) {
  constexpr int64_t N = hn::MaxLanes(D());
  const T size = static_cast<T>(n);
  auto sum = hn::Zero(d), products = hn::Zero(d);
  for (int64_t i = 0; i < padded; i += N) {
    const auto dxi = hn::Load(d, dx + i);
    sum = hn::Add(sum, dxi);
    products = hn::MulAdd(hn::Load(d, x + i), dxi, products);
  }
  const T along = hn::ReduceSum(d, products) / size;
  const auto mean = hn::Set(d, hn::ReduceSum(d, sum) / size), of_x = hn::Set(d, along), rs = hn::Set(d, r),
             rests = hn::Set(d, rest);
  for (int64_t i = 0; i < padded; i += N) {
    const auto xi = hn::Load(d, x + i);
    const auto centred = hn::NegMulAdd(of_x, xi, hn::Sub(hn::Load(d, dx + i), mean));
    hn::Store(hn::IfThenElseZero(Valid(d, i, n), hn::MulAdd(rs, centred, hn::Mul(rests, xi))), d, dz + i);
  }
  return along;
}

// to[j][i] = from[i][j]; rows and columns are multiples of 16.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Transpose(D d, const T* HWY_RESTRICT from, int64_t from_row, int64_t rows, int64_t columns,
                            T* HWY_RESTRICT to, int64_t to_row) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t i = 0; i < rows; i += N) {
    for (int64_t j = 0; j < columns; j += N) {
      hn::Vec<D> v[N];
      for (int64_t n = 0; n < N; ++n) v[n] = hn::Load(d, from + (i + n) * from_row + j);
      hs::Transpose(d, v);
      for (int64_t n = 0; n < N; ++n) hn::Store(v[n], d, to + (j + n) * to_row + i);
    }
  }
}

template <class T>
HWY_INLINE const T* At(const ConstTensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}
template <class T>
HWY_INLINE T* At(const TensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}

// A number of a token.
template <class T>
HWY_INLINE T NumberAt(const ConstTensorView& t, int64_t b, int64_t token, int64_t h) {
  return static_cast<T>(LoadAsDouble(t.dtype(), t.data(), b * t.stride(0) + token * t.stride(1) + h * t.stride(2)));
}
template <class T>
HWY_INLINE void StoreNumber(const TensorView& t, int64_t b, int64_t token, int64_t h, T value) {
  if (!t.present()) return;
  StoreDouble(t.dtype(), t.data(), b * t.stride(0) + token * t.stride(1) + h * t.stride(2), static_cast<double>(value));
}

// A part of a state of the caller. An absent state is zeros.
template <class T>
HWY_NOINLINE void LoadPart(const ConstTensorView& t, const Chunk<T>& c, int64_t n, int64_t h, int64_t part, T* to) {
  Clear(to, c.size);
  for (int64_t i = 0; i < c.rows && t.present(); ++i) {
    const T* row = At<T>(t, n, h, part) + i * t.stride(3);
    for (int64_t j = 0; j < c.K; ++j) to[i * c.Vp + j] = row[j * t.stride(4)];
  }
}
template <class T>
HWY_NOINLINE void StorePart(const TensorView& t, const Chunk<T>& c, int64_t n, int64_t h, int64_t part, const T* from) {
  for (int64_t i = 0; i < c.rows && t.present(); ++i) {
    T* row = At<T>(t, n, h, part) + i * t.stride(3);
    for (int64_t j = 0; j < c.K; ++j) row[j * t.stride(4)] = from[i * c.Vp + j];
  }
}

// The norm of a head.
template <class T>
HWY_NOINLINE void LoadNorm(const ConstTensorView& weight, const ConstTensorView& bias, int64_t h, Chunk<T>& c) {
  for (const auto& [t, to] : {std::pair{&weight, c.w}, {&bias, c.c}}) {
    Clear(to, c.Vp);
    for (int64_t j = 0; j < c.K; ++j) {
      to[j] = static_cast<T>(LoadAsDouble(t->dtype(), t->data(), h * t->stride(0) + j * t->stride(1)));
    }
  }
}

// Loads q, k and v of the chunk of a sequence from `token` on, whose place in its mini-batch is `offset`. Keys and
// queries end in 1, the input of b, where memories have K + 1 rows.
template <class S, class D, class Inputs, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadRows(D d, const Call& call, const Inputs& in, int64_t b, int64_t token, int64_t offset,
                           int64_t left, int64_t h, Chunk<T>& c) {
  c.count = ChunkTokens(call, offset, left);
  c.begins = offset == 0;
  c.ends = offset + c.count == call.mini_batch;
  for (int64_t i = 0; i < c.count; ++i) {
    T *q = c.q + i * c.Kp, *k = c.k + i * c.Kp;
    hs::LoadRow(d, At<S>(in.q, b, token + i, h), c.K, c.Kp, q);
    hs::LoadRow(d, At<S>(in.k, b, token + i, h), c.K, c.Kp, k);
    hs::LoadRow(d, At<S>(in.v, b, token + i, h), c.K, c.Vp, c.v + i * c.Vp);
    if (call.scale != 1) Scale(d, static_cast<T>(call.scale), q, c.Kp, q);
    if (c.rows > c.K) q[c.K] = k[c.K] = 1;
  }
  for (T* rows : {c.q, c.k}) Clear(rows + c.count * c.Kp, (kTokens - c.count) * c.Kp);
  Transpose(d, c.k, c.Kp, kTokens, c.Kp, c.kT, kTokens);
}

// to = rows M: what rows of keys or queries read in a matrix of the size of a part.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ReadRows(D d, const Chunk<T>& c, const T* rows, const T* M, T* to) {
  Clear(to, c.count * c.Vp);
  hs::Multiply(d, rows, c.Kp, 1, M, c.Vp, c.rows, c.count, c.Vp, to, c.Vp);
}

// x, e and the gradients g of z.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Train(D d, const Call& call, const T* z, Chunk<T>& c) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t t = 0; t < c.count; ++t) {
    T *x = c.x + t * c.Vp, *e = c.e + t * c.Vp, *g = c.g + t * c.Vp;
    const T *v = c.v + t * c.Vp, *k = c.k + t * c.Kp;
    c.r[t] = Normalise(d, z + t * c.Vp, c.K, c.Vp, call.eps, x);
    for (int64_t i = 0; i < c.Vp; i += N) {
      const auto w = hn::Load(d, c.w + i);
      const auto missed = hn::Sub(hn::Load(d, c.c + i), hn::Sub(hn::Load(d, v + i), hn::Load(d, k + i)));
      const auto of_e = hn::IfThenElseZero(Valid(d, i, c.K), hn::MulAdd(w, hn::Load(d, x + i), missed));
      hn::Store(of_e, d, e + i);
      hn::Store(hn::Mul(w, of_e), d, g + i);
    }
    GradientOfNorm(d, x, c.r[t], g, c.K, c.Vp, T{0}, g);
  }
}

// weighted[t][s] = rows[t] columns[s] pairs[t][s] for s <= t; -0 after.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void WeightPairs(D d, int64_t count, const T* rows, T factor, const T* columns, const T* pairs,
                            T* weighted) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto after = hn::Set(d, T{-0.0});
  for (int64_t t = 0; t < count; ++t) {
    const auto row = hn::Set(d, rows == nullptr ? factor : factor * rows[t]);
    for (int64_t s = 0; s < kTokens; s += N) {
      auto x = hn::Mul(row, hn::Load(d, pairs + t * kTokens + s));
      if (columns != nullptr) x = hn::Mul(x, hn::Load(d, columns + s));
      hn::Store(hn::IfThenElse(Valid(d, s, t + 1), x, after), d, weighted + t * kTokens + s);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::test_time_training::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_DELTA_COMMON_TEST_TIME_TRAINING_INL_H_
