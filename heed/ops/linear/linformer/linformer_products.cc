// Linformer's products over tokens, channels and projected tokens, for f32 and f64.
//
// Each packs blocks of both factors, widened, into cache and multiplies them by register tiles (simd/tile-inl.h):
// FMA-bound, packing costs 1/64 to 1/128 of it. One task computes each element of a result, in a summation order that
// depends only on the sizes of its sequence.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/ops/linear/linformer/linformer_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/linear/linformer/linformer_products.cc"  // this file
#include "hwy/foreach_target.h"                                               // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/convert-inl.h"
#include "heed/simd/tile-inl.h"
#include "heed/simd/transpose-inl.h"

#ifndef HEED_OPS_LINEAR_LINFORMER_PRODUCTS_ONCE_
#define HEED_OPS_LINEAR_LINFORMER_PRODUCTS_ONCE_
namespace heed::linformer {

inline constexpr int64_t kTokens = 128;  // tokens per block
inline constexpr int64_t kRows = 64;     // projected tokens per block
inline constexpr int64_t kColumns = 64;  // columns per block of the gradient of e

inline int64_t Blocks(int64_t count, int64_t block) { return (count + block - 1) / block; }

// Elements of a row, padded to whole vectors of any target.
inline int64_t Padded(int64_t size) { return Blocks(size, 16) * 16; }

// Packed memory of one thread: a block of e, a block of tokens, and their product.
template <class T>
struct Scratch {
  T *matrix, *tokens, *product, *total;

  Scratch(void* base, int64_t size) { LayOut(base, size); }
  static int64_t Bytes(int64_t size) { return Scratch(nullptr, size).bytes; }
  int64_t bytes;

 private:
  void LayOut(void* base, int64_t size) {
    const int64_t block = kTokens * Padded(size);
    Carver carver(base);
    carver.Next(matrix, kTokens * kTokens);
    carver.Next(tokens, block);
    carver.Next(product, std::max(block, kRows * kColumns));
    carver.Next(total, block);
    bytes = carver.bytes();
  }
};

// Maps a task to its part and the index in it, where part i has counts(i) tasks.
struct TaskOf {
  size_t part;
  int64_t index;
};
template <class F>
TaskOf FindTask(std::span<const Part> parts, int64_t task, const F& count) {
  size_t i = 0;
  for (; task >= count(parts[i]); ++i) task -= count(parts[i]);
  return {i, task};
}

}  // namespace heed::linformer
#endif  // HEED_OPS_LINEAR_LINFORMER_PRODUCTS_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heed::linformer::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// out[i][j] += sum_l a[i a_row + l a_step] b[l][j], l ascending, of whole vectors.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Multiply(D d, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step, int64_t count,
                           int64_t rows, int64_t columns, T* out, int64_t out_row) {
  constexpr size_t N = hn::MaxLanes(D());
  const size_t vectors = (static_cast<size_t>(columns) + N - 1) / N;
  hs::ForTiles<hs::kShapes.tile_vectors>(0, vectors, [&](auto c, size_t j) HWY_ATTR {
    hs::ForTiles<hs::TileRows<c.value>()>(0, static_cast<size_t>(rows), [&](auto r, size_t i) HWY_ATTR {
      const auto at = static_cast<int64_t>(i);
      hs::AccumulateTile<r.value, c.value, false>(d, a + at * a_row, a_row, a_step, b + j * N, b_step,
                                                  static_cast<size_t>(count), out + at * out_row + j * N, out_row);
    });
  });
}

template <class S>
HWY_INLINE S* RowAt(const Tokens& x, const Part& part, int64_t head, int64_t token) {
  return static_cast<S*>(x.data) + part.batch * x.batch_stride + (part.first + token) * x.token_stride +
         head * x.head_stride;
}

// `to` has whole vectors, with zeros beyond n.
template <class D, class S, class T = hn::TFromD<D>>
HWY_INLINE void LoadRow(D d, const S* from, int64_t n, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  int64_t i = 0;
  for (; i + N <= n; i += N) hn::Store(hs::LoadWide(d, from + i), d, to + i);
  if (i < n) hn::Store(hs::LoadWideN(d, from + i, static_cast<size_t>(n - i)), d, to + i);
}

// Tokens [begin, begin + n) of a head.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void PackTokens(D d, const Tokens& x, const Part& part, int64_t head, int64_t begin, int64_t n, T* to,
                           int64_t row) {
  hs::WithStorage<T>(x.dtype, [&](auto stored) HWY_ATTR {
    for (int64_t t = 0; t < n; ++t) {
      LoadRow(d, RowAt<decltype(stored)>(x, part, head, begin + t), x.size, to + t * row);
    }
  });
}

// m[row + r][column + c] for r < rows, c < columns, in rows of kTokens elements.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void PackMatrix(D d, const Matrix& m, int64_t row, int64_t rows, int64_t column, int64_t columns, T* to) {
  const auto pack = [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t r = 0; r < rows; ++r, to += kTokens) {
      const S* from = static_cast<const S*>(m.data) + (row + r) * m.row_stride + column * m.column_stride;
      if (m.column_stride == 1) {
        LoadRow(d, from, columns, to);
        continue;
      }
      for (int64_t c = 0; c < columns; ++c) {
        to[c] = static_cast<T>(LoadAsDouble(m.dtype, from, c * m.column_stride));
      }
    }
  };
  hs::WithStorage<T>(m.dtype, pack);
}

template <class T>
void ProjectT(Context& ctx, std::span<const Part> parts, const Matrix& m, const Tokens& x, const Wide& to) {
  const hn::ScalableTag<T> d;
  const int64_t row = Padded(x.size), blocks = Blocks(m.rows, kRows);
  ctx.ReserveScratch(Scratch<T>::Bytes(x.size));
  const int64_t tasks = static_cast<int64_t>(parts.size()) * x.heads * blocks;
  ctx.ParallelFor(tasks, [&](int64_t task, int worker) HWY_ATTR {
    const Scratch<T> s(ctx.Scratch(worker), x.size);
    const int64_t part = task / (x.heads * blocks), head = task / blocks % x.heads;
    const Part& p = parts[static_cast<size_t>(part)];
    const int64_t first = task % blocks * kRows, rows = std::min(kRows, m.rows - first);
    const auto bytes = static_cast<size_t>(rows * row) * sizeof(T);
    std::memset(s.total, 0, bytes);
    for (int64_t t = 0; t < p.count; t += kTokens) {
      const int64_t n = std::min(kTokens, p.count - t);
      PackMatrix(d, m, first, rows, p.column + t, n, s.matrix);
      PackTokens(d, x, p, head, t, n, s.tokens, row);
      std::memset(s.product, 0, bytes);
      Multiply(d, s.matrix, kTokens, 1, s.tokens, row, n, rows, x.size, s.product, row);
      for (int64_t i = 0; i < rows * row; ++i) s.total[i] += s.product[i];
    }
    T* at = static_cast<T*>(to.data) + to.At(part, head) + first * to.row_stride;
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(s.total + r * row, x.size, at + r * to.row_stride);
    }
  });
}

template <class T>
void ProjectBackT(Context& ctx, std::span<const Part> parts, const Matrix& m, const Wide& from, const Tokens& x) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const int64_t row = Padded(x.size);
  const auto tasks_of = [&](const Part& p) { return x.heads * Blocks(p.count, kTokens); };
  int64_t tasks = 0;
  for (const Part& p : parts) tasks += tasks_of(p);
  ctx.ReserveScratch(Scratch<T>::Bytes(x.size));
  ctx.ParallelFor(tasks, [&](int64_t task, int worker) HWY_ATTR {
    const Scratch<T> s(ctx.Scratch(worker), x.size);
    const TaskOf at = FindTask(parts, task, tasks_of);
    const Part& p = parts[at.part];
    const int64_t head = at.index % x.heads, begin = at.index / x.heads * kTokens;
    const int64_t n = std::min(kTokens, p.count - begin);
    std::memset(s.product, 0, static_cast<size_t>(n * row) * sizeof(T));
    const T* sums = static_cast<const T*>(from.data) + from.At(static_cast<int64_t>(at.part), head);
    for (int64_t r = 0; r < m.rows; r += kTokens) {
      const int64_t rows = std::min(kTokens, m.rows - r);
      PackMatrix(d, m, r, rows, p.column + begin, n, s.matrix);
      for (int64_t i = 0; i < rows; ++i) {
        LoadRow(d, sums + (r + i) * from.row_stride, x.size, s.tokens + i * row);
      }
      Multiply(d, s.matrix, 1, kTokens, s.tokens, row, rows, n, x.size, s.product, row);
    }
    hs::WithStorage<T>(x.dtype, [&](auto stored) HWY_ATTR {
      for (int64_t t = 0; t < n; ++t) {
        auto* to = RowAt<decltype(stored)>(x, p, head, begin + t);
        for (int64_t i = 0; i < x.size; i += N) {
          hs::StoreRounded(d, hn::Load(d, s.product + t * row + i), to + i,
                           static_cast<size_t>(std::min(N, x.size - i)));
        }
      }
    });
  });
}

// Tokens [begin, begin + n) of a head, n <= kColumns, transposed: to[channel][token].
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void PackTransposed(D d, const Tokens& x, const Part& part, int64_t head, int64_t begin, int64_t n, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  hs::WithStorage<T>(x.dtype, [&](auto stored) HWY_ATTR {
    for (int64_t t = 0; t < n; t += N) {
      for (int64_t c = 0; c < x.size; c += N) {
        hn::Vec<D> v[hn::MaxLanes(D())];
        for (int64_t i = 0; i < N; ++i) {
          v[i] = t + i < n ? hs::LoadWideN(d, RowAt<decltype(stored)>(x, part, head, begin + t + i) + c,
                                           static_cast<size_t>(std::min(N, x.size - c)))
                           : hn::Zero(d);
        }
        hs::Transpose(d, v);
        for (int64_t i = 0; i < N && c + i < x.size; ++i) {
          hn::Store(v[i], d, to + (c + i) * kColumns + t);
        }
      }
    }
  });
}

template <class T>
void AddOuterSumsT(Context& ctx, std::span<const Part> parts, const Wide& from, const Tokens& x, int64_t rows,
                   int64_t stride, void* sums) {
  const hn::ScalableTag<T> d;
  ctx.ReserveScratch(Scratch<T>::Bytes(x.size));
  ctx.ParallelFor(stride / kColumns, [&](int64_t task, int worker) HWY_ATTR {
    const Scratch<T> s(ctx.Scratch(worker), x.size);
    const int64_t column = task * kColumns;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& p = parts[i];
      const int64_t begin = std::max<int64_t>(column - p.column, 0);  // of its tokens
      const int64_t end = std::min(column + kColumns - p.column, p.count);
      if (begin >= end) continue;
      const int64_t n = end - begin;
      for (int64_t head = 0; head < x.heads; ++head) {
        PackTransposed(d, x, p, head, begin, n, s.tokens);
        const T* a = static_cast<const T*>(from.data) + from.At(static_cast<int64_t>(i), head);
        for (int64_t r = 0; r < rows; r += kRows) {
          const int64_t m = std::min(kRows, rows - r);
          std::memset(s.product, 0, static_cast<size_t>(m * kColumns) * sizeof(T));
          Multiply(d, a + r * from.row_stride, from.row_stride, 1, s.tokens, kColumns, x.size, m, n, s.product,
                   kColumns);
          for (int64_t j = 0; j < m; ++j) {
            T* to = static_cast<T*>(sums) + (r + j) * stride + p.column + begin;
            const T* of = s.product + j * kColumns;
            for (int64_t t = 0; t < n; ++t) to[t] += of[t];
          }
        }
      }
    }
  });
}

// Calls f(part, first row of the part in wide memory, token, count) for blocks of tokens.
template <class F>
void ForTokenBlocks(Context& ctx, std::span<const Part> parts, const F& f) {
  const auto tasks_of = [](const Part& p) { return Blocks(p.count, kTokens); };
  int64_t tasks = 0;
  for (const Part& p : parts) tasks += tasks_of(p);
  ctx.ParallelFor(tasks, [&](int64_t task, int) HWY_ATTR {
    const TaskOf at = FindTask(parts, task, tasks_of);
    int64_t row = 0;
    for (size_t i = 0; i < at.part; ++i) row += parts[i].count;
    const Part& p = parts[at.part];
    const int64_t begin = at.index * kTokens;
    f(p, row, begin, std::min(kTokens, p.count - begin));
  });
}

template <class T, bool kLoad>
void CopyTokensT(Context& ctx, std::span<const Part> parts, const Tokens& x, const Wide& wide) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(hn::ScalableTag<T>());
  ForTokenBlocks(ctx, parts, [&](const Part& p, int64_t row, int64_t begin, int64_t n) HWY_ATTR {
    hs::WithStorage<T>(x.dtype, [&](auto stored) HWY_ATTR {
      for (int64_t head = 0; head < x.heads; ++head) {
        T* mine = static_cast<T*>(wide.data) + wide.At(0, head) + (row + begin) * wide.row_stride;
        for (int64_t t = 0; t < n; ++t, mine += wide.row_stride) {
          auto* theirs = RowAt<decltype(stored)>(x, p, head, begin + t);
          for (int64_t i = 0; i < x.size; i += N) {
            const auto left = static_cast<size_t>(std::min(N, x.size - i));
            if constexpr (kLoad) {
              hs::StoreRounded(d, hs::LoadWideN(d, theirs + i, left), mine + i, left);
            } else {
              hs::StoreRounded(d, hn::LoadN(d, mine + i, left), theirs + i, left);
            }
          }
        }
      }
    });
  });
}

void ProjectImpl(Context& ctx, DType wide, std::span<const Part> parts, const Matrix& m, const Tokens& x,
                 const Wide& to) {
  (wide == DType::kF64 ? &ProjectT<double> : &ProjectT<float>)(ctx, parts, m, x, to);
}

void ProjectBackImpl(Context& ctx, DType wide, std::span<const Part> parts, const Matrix& m, const Wide& from,
                     const Tokens& x) {
  (wide == DType::kF64 ? &ProjectBackT<double> : &ProjectBackT<float>)(ctx, parts, m, from, x);
}

void AddOuterSumsImpl(Context& ctx, DType wide, std::span<const Part> parts, const Wide& from, const Tokens& x,
                      int64_t rows, int64_t stride, void* sums) {
  (wide == DType::kF64 ? &AddOuterSumsT<double> : &AddOuterSumsT<float>)(ctx, parts, from, x, rows, stride, sums);
}

void LoadTokensImpl(Context& ctx, DType wide, std::span<const Part> parts, const Tokens& x, const Wide& to) {
  (wide == DType::kF64 ? &CopyTokensT<double, true> : &CopyTokensT<float, true>)(ctx, parts, x, to);
}

void StoreTokensImpl(Context& ctx, DType wide, std::span<const Part> parts, const Wide& from, const Tokens& x) {
  (wide == DType::kF64 ? &CopyTokensT<double, false> : &CopyTokensT<float, false>)(ctx, parts, x, from);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::linformer::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::linformer {

HWY_EXPORT(ProjectImpl);
HWY_EXPORT(ProjectBackImpl);
HWY_EXPORT(AddOuterSumsImpl);
HWY_EXPORT(LoadTokensImpl);
HWY_EXPORT(StoreTokensImpl);

int64_t ProductBytes(DType wide, int64_t size) {
  return wide == DType::kF64 ? Scratch<double>::Bytes(size) : Scratch<float>::Bytes(size);
}

void Project(Context& ctx, DType wide, std::span<const Part> parts, const Matrix& m, const Tokens& x, const Wide& to) {
  HWY_DISPATCH_TABLE(ProjectImpl)[TargetIndex(ctx.allowed_targets())](ctx, wide, parts, m, x, to);
}

void ProjectBack(Context& ctx, DType wide, std::span<const Part> parts, const Matrix& m, const Wide& from,
                 const Tokens& x) {
  HWY_DISPATCH_TABLE(ProjectBackImpl)[TargetIndex(ctx.allowed_targets())](ctx, wide, parts, m, from, x);
}

void AddOuterSums(Context& ctx, DType wide, std::span<const Part> parts, const Wide& from, const Tokens& x,
                  int64_t rows, int64_t stride, void* sums) {
  HWY_DISPATCH_TABLE(AddOuterSumsImpl)
  [TargetIndex(ctx.allowed_targets())](ctx, wide, parts, from, x, rows, stride, sums);
}

void LoadTokens(Context& ctx, DType wide, std::span<const Part> parts, const Tokens& x, const Wide& to) {
  HWY_DISPATCH_TABLE(LoadTokensImpl)[TargetIndex(ctx.allowed_targets())](ctx, wide, parts, x, to);
}

void StoreTokens(Context& ctx, DType wide, std::span<const Part> parts, const Wide& from, const Tokens& x) {
  HWY_DISPATCH_TABLE(StoreTokensImpl)[TargetIndex(ctx.allowed_targets())](ctx, wide, parts, from, x);
}

}  // namespace heed::linformer
#endif  // HWY_ONCE
